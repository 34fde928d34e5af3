// Searches in the site of the documentation in a headless Chromium. Arguments: the folder with node_modules, the site's
// address, and words. Fails unless the first result leads to a page with them, or if another address is asked for anything.

import { createRequire } from "node:module";
import { join } from "node:path";

const [modules, address, words] = process.argv.slice(2);
const { chromium } = createRequire(join(modules, "package.json"))("playwright-core");
const patience = Number(process.env.FLEXMARL_PATIENCE_MS ?? 120_000);

const browser = await chromium.launch({
  executablePath: process.env.FLEXMARL_CHROMIUM,
  args: ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync"],
});
const problems = [];
const page = await browser.newPage();
page.setDefaultTimeout(patience);
page.on("pageerror", (error) => problems.push(error.message));
page.on("request", (request) => {
  if (!request.url().startsWith(address) && !request.url().startsWith("data:")) problems.push(`asks for ${request.url()}`);
});
await page.goto(`${address}index.html`);
await page.getByRole("button", { name: "Search" }).click();
await page.getByRole("combobox", { name: "Search" }).fill(words);
// The list has the pages of no words at first.
const result = page.locator("a[role=option]", { hasText: words }).first();
await result.click();
await page.waitForURL((url) => !url.pathname.endsWith("/index.html"));
await page.waitForFunction((words) => document.querySelector("article").textContent.includes(words), words);
await browser.close();
if (problems.length) {
  console.log(problems.join("\n"));
  process.exit(1);
}
