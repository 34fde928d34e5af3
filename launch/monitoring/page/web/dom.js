// Elements, with texts as texts: nothing on the page is ever read as HTML.

const LONGEST_LINE = 2000;

/** An element with attributes and children. A function is a listener, true an empty attribute; null is left out. */
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") made.addEventListener(name, value);
    else made.setAttribute(name, value === true ? "" : String(value));
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

/** Removes all children and puts others in. */
export function fill(place, ...children) {
  place.replaceChildren(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return place;
}

/** A text of any length: what is beyond `most` characters comes with a button. `rest` fetches a part that is not here. */
export function longText(text, { most = LONGEST_LINE, total = text.length, rest = null, tag = "pre" } = {}) {
  const place = element(tag, { class: "text" });
  let shown = Math.min(most, text.length);
  place.append(text.slice(0, shown));
  if (total > shown) {
    const more = element("button", { type: "button", class: "more" });
    const label = () => { more.textContent = `more: ${(total - shown).toLocaleString("en")} characters`; };
    label();
    more.addEventListener("click", async () => {
      more.disabled = true;
      const part = shown < text.length ? text.slice(shown, shown + 10 * most) : rest ? await rest(shown) : "";
      more.disabled = false;
      more.before(part);
      shown += part.length;
      if (shown >= total || !part) more.remove();
      else label();
    });
    place.append(more);
  }
  return place;
}

/** A table. `columns`: heads, or `{head, number: true}`. Cells are texts or elements. */
export function table(columns, rows, caption = "") {
  const isNumber = columns.map((column) => column.number === true);
  const heads = columns.map((column, place) =>
    element("th", { scope: "col", class: isNumber[place] ? "number" : null }, column.head ?? column));
  const body = rows.map((row) => element("tr", {}, row.map((cell, place) =>
    element("td", { class: isNumber[place] ? "number" : null }, cell ?? "–"))));
  return element("div", { class: "wide", tabindex: 0, role: "region", "aria-label": caption || "table" },
    element("table", {}, element("thead", {}, element("tr", {}, heads)), element("tbody", {}, body)));
}

/** A card with a heading. */
export function card(title, ...children) {
  return element("section", { class: "card" }, title ? element("h2", {}, title) : null, ...children);
}

/** Calls `work` at most once in a frame, however often the returned function is called. */
export function oncePerFrame(work) {
  let waits = false;
  return () => {
    if (waits) return;
    waits = true;
    requestAnimationFrame(() => { waits = false; work(); });
  };
}
