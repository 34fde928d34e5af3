// Checks of the page in a headless Chromium. Arguments: the folder with node_modules, one for screenshots, and as JSON
// the addresses of pages. A check that fails ends the program with its words. `GROW` on stdout asks for another step.

import { createRequire } from "node:module";
import { mkdtempSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";

const [modules, pictures, text] = process.argv.slice(2);
const addresses = JSON.parse(text);
const require = createRequire(join(modules, "package.json"));
const { chromium } = require("playwright-core");
const axe = readFileSync(require.resolve("axe-core/axe.min.js"), "utf8");
const PANELS = ["now", "learning", "trajectories", "timeline", "policies", "figures", "settings"];
const patience = { timeout: Number(process.env.FLEXMARL_PATIENCE_MS ?? 120_000) };

const profile = mkdtempSync(join(tmpdir(), "flexmarl-browser-"));
const browser = await chromium.launchPersistentContext(profile, {
  executablePath: process.env.FLEXMARL_CHROMIUM,
  headless: true,
  args: ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync"],
});

function assert(holds, words) {
  if (!holds) throw new Error(words);
}

/** A page that fails at errors of its scripts, at refusals of its policy, and at requests for other addresses. */
async function open(address, { width = 1400, scheme = "light" } = {}) {
  const page = await browser.newPage();
  page.problems = [];
  page.setDefaultTimeout(patience.timeout);
  await page.setViewportSize({ width, height: 900 });
  await page.emulateMedia({ colorScheme: scheme });
  page.on("pageerror", (error) => page.problems.push(error.message));
  page.on("dialog", (dialog) => { page.problems.push(`dialog: ${dialog.message()}`); dialog.dismiss(); });
  page.on("console", (message) => { if (message.type() === "error" && !/status of 422/.test(message.text())) page.problems.push(message.text()); });
  const origin = new URL(address).origin;
  page.on("request", (request) => { if (!request.url().startsWith("data:") && new URL(request.url()).origin !== origin) page.problems.push(`asks for ${request.url()}`); });
  await page.goto(address, patience);
  return page;
}

async function close(page, name) {
  if (name) await page.screenshot({ path: join(pictures, `${name}.png`) });
  assert(!page.problems.length, `${name}: ${page.problems.join("; ")}`);
  await page.close();
}

const checks = {
  async "a curve moves while the run is running"() {
    const page = await open(`${addresses.live}#learning`);
    const legend = page.locator(".chart", { hasText: "Reward in training" }).locator(".legend b").first();
    await legend.waitFor();
    const before = await legend.textContent();
    console.log("GROW");
    await page.waitForFunction(([words]) => {
      const chart = [...document.querySelectorAll(".chart")].find((one) => one.textContent.includes("Reward in training"));
      return chart.querySelector(".legend b").textContent !== words;
    }, [before], patience);
    await page.locator(".live", { hasText: "connected" }).waitFor();
    await close(page, "learning");
  },

  async "a part of a curve that is dragged over is fetched with all its points"() {
    const page = await open(`${addresses.live}#learning`);
    const card = page.locator(".chart", { hasText: "Reward in training" });
    await card.scrollIntoViewIfNeeded();
    await card.locator(".u-over").waitFor();
    let fetched = false;
    page.on("request", (request) => { fetched ||= /curves\?.*first=\d+&last=\d+/.test(request.url()); });
    for (const end = Date.now() + patience.timeout; !fetched; ) {
      assert(Date.now() < end, "no part is fetched");
      const { x, y, width, height } = await card.locator(".u-over").boundingBox(); // charts above may still come
      await page.mouse.move(x + 0.3 * width, y + height / 2);
      await page.mouse.down();
      await page.mouse.move(x + 0.7 * width, y + height / 2, { steps: 5 });
      await page.mouse.up();
      await page.waitForTimeout(300);
    }
    await close(page);
  },

  async "the keyboard alone reaches every panel"() {
    const page = await open(`${addresses.live}#now`);
    await page.locator("h1").waitFor();
    for (const name of PANELS.slice(1)) {
      await page.evaluate(() => document.activeElement?.blur?.());
      for (let presses = 0; ; presses += 1) {
        assert(presses < 60, `no way by the tab key to ${name}`);
        await page.keyboard.press("Tab");
        if (await page.evaluate((panel) => document.activeElement.getAttribute("href")?.startsWith(`#${panel}`), name)) break;
      }
      await page.keyboard.press("Enter");
      await page.locator(`.panel.${name}`).waitFor();
      assert(await page.locator(`nav a[aria-current=page]`).getAttribute("href") === `#${name}`, `${name} is not marked`);
    }
    await page.goto(`${addresses.live}#learning`);
    await page.locator(".canvas canvas").first().waitFor();
    await page.locator(".canvas").first().focus();
    await page.keyboard.press("Home");
    await page.locator(".legend .at", { hasText: "step" }).first().waitFor();
    await close(page);
  },

  async "a filter finds a trajectory, and its address can be sent"() {
    const page = await open(`${addresses.live}#trajectories`);
    await page.locator(".list a").first().waitFor();
    await page.getByLabel("Query").fill("q7");
    await page.locator("output", { hasText: /^2 trajectories$/ }).waitFor();
    await page.locator(".list a").first().click();
    await page.locator(".conversation h2", { hasText: "query q7" }).waitFor();
    await page.getByLabel("Show").selectOption("logprob");
    await page.locator(".tokens .token").first().waitFor();
    const link = page.url();
    await close(page, "trajectories");
    const other = await open(link);
    await other.locator(".conversation h2", { hasText: "query q7" }).waitFor();
    await close(other);
  },

  async "tokens are shaded by the difference of trainer and engine, by keyboard alone"() {
    const page = await open(`${addresses.live}#trajectories?query=q7&kind=training&order=oldest`);
    await page.locator(".conversation h2", { hasText: "query q7" }).waitFor();
    await page.getByText("differs by 0.13 a token").first().waitFor();
    await page.getByLabel("Show").focus();
    for (let presses = 0; await page.getByLabel("Show").inputValue() !== "difference"; presses += 1) {
      assert(presses < 5, "no key chooses the difference");
      await page.keyboard.press("ArrowDown");
    }
    await page.locator(".legend", { hasText: "trainer and engine differ" }).waitFor();
    await page.waitForFunction(() => {
      const tints = [...document.querySelectorAll(".tokens .token")].map((token) => token.style.getPropertyValue("--tint"));
      return tints.length === 3 && tints.every((tint) => tint === "52%"); // a third of the scale for every tenfold
    }, null, patience);
    await page.locator(".tokens").first().focus();
    await page.keyboard.press("End");
    await page.locator(".token-facts", { hasText: "token 2 of 2" }).waitFor();
    await page.locator(".token-facts", { hasText: "trainer +0.13" }).waitFor();
    await page.getByRole("button", { name: /^at most 0.13, at token 1$/ }).first().press("Enter");
    await page.locator(".token-facts", { hasText: "token 1 of 2" }).waitFor();
    await close(page, "differences");
  },

  async "next and previous walk the list"() {
    const page = await open(`${addresses.live}#trajectories`);
    await page.locator(".conversation h2").waitFor();
    const first = await page.locator(".conversation h2").textContent();
    await page.keyboard.press("j");
    await page.waitForFunction((words) => document.querySelector(".conversation h2").textContent !== words, first, patience);
    await page.getByText("← previous").click();
    await page.waitForFunction((words) => document.querySelector(".conversation h2").textContent === words, first, patience);
    await close(page);
  },

  async "figures are found by a word"() {
    const page = await open(`${addresses.live}#figures`);
    await page.locator(".chart").first().waitFor();
    await page.getByLabel("Search").fill("norm of the gradient");
    await page.locator("output", { hasText: /^1 of \d+ figures$/ }).waitFor();
    await page.locator(".chart canvas").waitFor();
    await close(page, "figures");
  },

  async "the timeline is zoomed, and a span leads to its trajectory"() {
    const page = await open(`${addresses.live}#timeline`);
    const words = page.locator(".panel.timeline [role=status]").first();
    await page.locator(".panel.timeline p", { hasText: "are shown" }).waitFor();
    const canvas = page.locator("canvas");
    const before = await words.textContent();
    const { width } = await canvas.boundingBox();
    await canvas.hover({ position: { x: width / 2, y: 34 } });
    await page.mouse.wheel(0, -300);
    await canvas.focus();
    await page.keyboard.press("+");
    await page.waitForFunction((old) => /are shown/.test(document.querySelector(".panel.timeline").textContent) && !document.querySelector(".panel.timeline").textContent.includes(old), before, patience);
    await canvas.click({ position: { x: width / 2, y: 34 } });
    await page.locator(".card.span h2", { hasText: "turn" }).waitFor();
    await page.screenshot({ path: join(pictures, "timeline.png") });
    await page.getByText("Its trajectory").click();
    await page.locator(".conversation h2", { hasText: "query q7" }).waitFor();
    await close(page);
  },

  async "trajectories of the same query stand side by side"() {
    const page = await open(`${addresses.two}#trajectories?query=q7&kind=training&order=oldest`);
    await page.locator(".conversation h2", { hasText: "query q7" }).first().waitFor();
    await page.getByRole("combobox", { name: "Run", exact: true }).selectOption({ label: "second" });
    await page.locator(".run-of", { hasText: "second" }).first().waitFor();
    await page.getByLabel("Beside it").selectOption({ label: "other" });
    const other = page.getByRole("article", { name: "The other run" });
    await other.locator("h2", { hasText: "step 7 · query q7 · trajectory 0" }).waitFor();
    await other.locator(".run-of", { hasText: "other" }).waitFor();
    await page.keyboard.press("Escape");
    await page.getByText("next →").click();
    await other.locator("h2", { hasText: "step 7 · query q7 · trajectory 1" }).waitFor();
    await other.getByLabel("Which one").selectOption({ index: 1 });
    await other.locator("h2", { hasText: "trajectory 0" }).waitFor();
    const link = page.url();
    await close(page, "two-trajectories");
    const again = await open(link);
    await again.getByRole("article", { name: "The other run" }).locator("h2", { hasText: "trajectory 0" }).waitFor();
    await close(again);
  },

  async "the timelines of two runs stand one above the other, aligned"() {
    const page = await open(`${addresses.two}#timeline`);
    await page.locator(".panel.timeline p", { hasText: "From 0 s" }).waitFor();
    assert(await page.locator("canvas").count() === 2, "a timeline for each run");
    await page.getByLabel("Aligned by the begin of step").fill("2");
    await page.locator(".panel.timeline p", { hasText: "From -0.2 s, 2.4 s are shown" }).waitFor();
    const canvas = page.locator("canvas").nth(1);
    await canvas.focus();
    await page.keyboard.press("-");
    await page.locator(".panel.timeline p", { hasText: "3.84 s are shown" }).waitFor();
    const lane = await page.locator(".names").nth(1).locator("span", { hasText: "orchestrator" }).evaluate((one) => [...one.parentElement.children].indexOf(one));
    for (let presses = 0; presses < lane; presses += 1) await page.keyboard.press("ArrowDown");
    await page.keyboard.press("Enter");
    await page.locator(".card.span .lead", { hasText: "second · orchestrator" }).waitFor();
    await page.locator(".card.span .legend li", { hasText: "step2" }).waitFor();
    await page.screenshot({ path: join(pictures, "two-timelines.png"), fullPage: true });
    await page.getByLabel("Aligned by the begin of step").fill("9");
    await page.locator(".notice", { hasText: "has no span of step 9" }).waitFor();
    await close(page);
  },

  async "two runs are laid on each other and their settings compared"() {
    const page = await open(`${addresses.two}#learning`);
    await page.locator(".chart .legend li", { hasText: "second" }).first().waitFor();
    await page.getByRole("combobox", { name: "Runs" }).selectOption("band");
    await page.locator(".chart .legend li", { hasText: /^sorter/ }).first().waitFor();
    await close(page, "two-runs");
    const settings = await open(`${addresses.two}#settings`);
    await settings.locator("td .differs", { hasText: "8" }).first().waitFor();
    assert(await settings.locator(".panel table").first().locator("tbody tr").count() === 1, "one key differs");
    await close(settings, "settings");
  },

  async "hostile texts are shown and not obeyed"() {
    const page = await open(`${addresses.hostile}#now`);
    await page.locator(".news").waitFor();
    for (const name of PANELS) {
      await page.goto(`${addresses.hostile}#${name}`);
      await page.locator(`.panel.${name}`).waitFor();
      if (name === "trajectories") {
        await page.locator(".conversation .more").first().waitFor();
        await page.locator(".conversation .more").first().click();
      }
      assert(await page.locator("main img, main script, main iframe, main b > i").count() === 0, `${name} has elements of a text`);
      const shown = await page.locator("main").innerText();
      assert(!/[\u202e\u0000-\u0008\u001b]/.test(shown), `${name} has control characters`);
      const length = await page.evaluate(() => document.querySelector("main").textContent.length);
      assert(length < 500_000, `${name} has ${length} characters`);
    }
    await close(page, "hostile");
  },

  async "a torn folder is no blank page"() {
    const page = await open(addresses.torn);
    for (const name of PANELS) {
      await page.goto(`${addresses.torn}#${name}`);
      await page.locator(`.panel.${name}`).waitFor();
      await page.waitForFunction(() => document.querySelector("main").innerText.trim().length > 5, null, patience);
    }
    await close(page, "torn");
  },

  async "dark and phone width hold"() {
    for (const [width, scheme] of [[390, "light"], [1400, "dark"]]) {
      const page = await open(`${addresses.live}#${PANELS[0]}`, { width, scheme });
      for (const name of PANELS) {
        await page.goto(`${addresses.live}#${name}`);
        await page.locator(`.panel.${name} .card`).first().waitFor();
        const [whole, shown, paper] = await page.evaluate(() => [document.documentElement.scrollWidth, document.documentElement.clientWidth, getComputedStyle(document.body).backgroundColor]);
        assert(whole <= shown, `${name} at ${width} is ${whole} wide`);
        assert((paper === "rgb(13, 16, 21)") === (scheme === "dark"), `${name} ${scheme}: ${paper}`);
        await page.screenshot({ path: join(pictures, `${name}-${width}-${scheme}.png`) });
      }
      await close(page);
    }
  },

  async "the report is the same page without a server"() {
    const page = await open(addresses.frozen);
    for (const name of PANELS) {
      await page.goto(`${addresses.frozen}#${name}`);
      await page.locator(`.panel.${name} .card`).first().waitFor();
    }
    await page.goto(`${addresses.frozen}#learning`);
    await page.locator(".chart canvas").first().waitFor();
    await page.goto(`${addresses.frozen}#trajectories`);
    await page.locator(".conversation .turn").first().waitFor();
    await close(page, "frozen");
  },

  async "axe finds no serious violation"() {
    const OF_TWO = ["learning", "trajectories", "timeline", "settings"]; // the others look as with one run
    const WITHOUT_SERVER = ["now", "trajectories"];
    for (const [address, scheme, panels] of [[addresses.live, "light", PANELS], [addresses.live, "dark", PANELS],
      [addresses.two, "light", OF_TWO], [addresses.frozen, "light", WITHOUT_SERVER]]) {
      const page = await open(`${address}#${panels[0]}`, { scheme });
      // By the debugger: the policy of the page lets no script in.
      const session = await browser.newCDPSession(page);
      await session.send("Runtime.evaluate", { expression: axe });
      for (const name of panels) {
        await page.goto(`${address}#${name}`);
        await page.locator(`.panel.${name} .card`).first().waitFor();
        const answer = await session.send("Runtime.evaluate", { expression: "axe.run()", awaitPromise: true, returnByValue: true });
        assert(!answer.exceptionDetails, JSON.stringify(answer.exceptionDetails));
        const bad = answer.result.value.violations.filter((one) => ["serious", "critical"].includes(one.impact));
        assert(!bad.length, `${name} ${scheme}: ${bad.map((one) => `${one.id}: ${one.nodes.slice(0, 3).map((node) => node.html.slice(0, 200)).join(" | ")}`).join("; ")}`);
      }
      await close(page);
    }
  },
};

let status = 0;
for (const [name, check] of Object.entries(checks)) {
  try {
    await check();
    console.log(`holds: ${name}`);
  } catch (error) {
    status = 1;
    console.log(`FAILS: ${name}: ${error.message}`);
  }
}
await browser.close();
rmSync(profile, { recursive: true, force: true });
process.exit(status);
