// The data of the page: from the server while the run lives, or out of the file that it was frozen into.

/** The source of this page. Its methods are the same for a live and a frozen one. */
export async function openSource() {
  const inert = document.getElementById("frozen");
  return inert ? new FrozenSource(JSON.parse(inert.textContent)) : LiveSource.open();
}

class LiveSource {
  static async open() {
    return new LiveSource(await answer("page.json"));
  }

  constructor(facts) {
    this.facts = facts;
    this.isFrozen = false;
    this.revisions = facts.revisions;
  }

  /** The values of a panel for one run. */
  view(panel, run, parameters = {}) {
    return answer(`panels/${panel}.json?${new URLSearchParams({ run, ...parameters })}`);
  }

  /** Curves of one run by key. */
  curves(run, keys, parameters = {}) {
    return keys.length ? answer(`curves?${new URLSearchParams({ run, keys: keys.join("\n"), ...parameters })}`) : {};
  }

  /** Calls `changed` with the places of the runs that have grown, and `connected` with true or false. */
  follow(changed, connected) {
    const events = new EventSource("changes");
    events.onopen = () => connected(true);
    events.onerror = () => connected(false);
    events.onmessage = (message) => {
      const revisions = JSON.parse(message.data);
      const grown = revisions.flatMap((revision, run) => (revision === this.revisions[run] ? [] : [run]));
      this.revisions = revisions;
      if (grown.length) changed(grown);
    };
  }
}

class FrozenSource {
  constructor(data) {
    this.facts = data.facts;
    this.isFrozen = true;
    this.data = data;
  }

  async view(panel, run, parameters = {}) {
    const views = this.data.views[run][panel];
    const view = views[parameters.of ?? ""];
    if (!view) throw new Error("This part is not in the file. Open the run with flexmarl page to see it.");
    return view;
  }

  async curves(run, keys) {
    const curves = this.data.curves[run];
    return Object.fromEntries(keys.map((key) => [key, curves[key] ?? { steps: [], mean: [] }]));
  }

  follow() {}
}

async function answer(address) {
  const response = await fetch(address);
  const value = await response.json();
  if (!response.ok) throw new Error(value.error ?? `the server answers ${response.status}`);
  return value;
}
