// Opens a page twice in a headless Chromium. Arguments: the folder with node_modules, one for Chromium's files, the
// address. Prints for each visit the milliseconds from the begin of the navigation until the first paint of content, and
// until a frame after the tiles of the panel Now are there.

import { createRequire } from "node:module";
import { join } from "node:path";

const [modules, profile, address] = process.argv.slice(2);
const { chromium } = createRequire(join(modules, "package.json"))("playwright-core");
const patience = { timeout: Number(process.env.FLEXMARL_PATIENCE_MS) };

const browser = await chromium.launchPersistentContext(profile, {
  executablePath: process.env.FLEXMARL_CHROMIUM,
  headless: true,
  args: ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync"],
});

async function visit() {
  const page = await browser.newPage();
  await page.addInitScript(() => {
    const watch = new MutationObserver(() => {
      if (!document.querySelector("dl.tiles dd")) return;
      watch.disconnect();
      requestAnimationFrame(() => setTimeout(() => { window.tilesAt = performance.now(); }));
    });
    watch.observe(document, { childList: true, subtree: true });
  });
  await page.goto(address, patience);
  await page.waitForFunction(() => window.tilesAt && performance.getEntriesByName("first-contentful-paint").length, null, patience);
  const times = await page.evaluate(() => ({
    paint: performance.getEntriesByName("first-contentful-paint")[0].startTime, tiles: window.tilesAt,
  }));
  await page.close();
  return times;
}

try {
  const warm = await browser.newPage(); // the browser's own start is no part of the page
  await warm.close();
  console.log(JSON.stringify([await visit(), await visit()]));
} finally {
  await browser.close();
}
