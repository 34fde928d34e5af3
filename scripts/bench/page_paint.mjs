// Opens a page twice in a headless Chromium. Arguments: the folder with node_modules, one for Chromium's files, the
// address. Prints for each visit the milliseconds from the begin of the navigation until the first paint of content, and
// until a frame after the tiles of the panel Now are there. Then the frames a second while the timeline is zoomed and
// panned, and the slowest tenth of these frames, in milliseconds.

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

async function turnWheel() {
  const page = await browser.newPage();
  await page.goto(`${address}#timeline`, patience);
  await page.locator(".panel.timeline p", { hasText: "are shown" }).waitFor(patience);
  const frames = await page.evaluate((most) => new Promise((end) => {
    const canvas = document.querySelector(".panel.timeline canvas"), { left, width, top } = canvas.getBoundingClientRect();
    const times = [];
    const step = (now) => {
      times.push(now);
      if (now - times[0] >= most) return end(times.slice(1).map((time, place) => time - times[place]));
      // Half a second in, half a second along, half a second out.
      const part = Math.floor((now - times[0]) / 500) % 3;
      const wheel = [{ deltaY: -30 }, { deltaX: 20 }, { deltaY: 30 }][part];
      canvas.dispatchEvent(new WheelEvent("wheel", { ...wheel, clientX: left + width / 3, clientY: top + 30, bubbles: true, cancelable: true }));
      requestAnimationFrame(step);
    };
    requestAnimationFrame(step);
  }), 6000);
  await page.close();
  const sum = frames.reduce((all, ms) => all + ms, 0), sorted = frames.toSorted((one, other) => one - other);
  return { perSecond: 1000 * frames.length / sum, slow: sorted[Math.floor(0.9 * sorted.length)] };
}

try {
  const warm = await browser.newPage(); // the browser's own start is no part of the page
  await warm.close();
  console.log(JSON.stringify([await visit(), await visit(), await turnWheel()]));
} finally {
  await browser.close();
}
