// Asks the server for a newer page, and swaps the parts of this one for it; what a reader has set stays.
(() => {
  "use strict";

  const EVERY = 2000; // milliseconds, or more if an answer takes long
  const live = document.querySelector("p.live");
  const main = () => document.querySelector("main");
  const controls = () => [...main().querySelectorAll("button, select, summary, [tabindex]")];
  let tag = null;
  let held = false; // a button of the mouse is down: something is being dragged
  addEventListener("pointerdown", () => { held = true; }, true);
  for (const end of ["pointerup", "pointercancel", "blur"]) addEventListener(end, () => { held = false; }, true);

  const key = (figure) => figure.dataset.chart ?? `map ${figure.dataset.map}`;
  const each = (found, visit) => document.querySelectorAll(found).forEach(visit);

  function remember() {
    const kept = { open: [], pressed: {}, chosen: {}, zoom: {}, focus: controls().indexOf(document.activeElement) };
    each("details", (one) => kept.open.push(one.open));
    each("figure", (figure) => {
      for (const one of figure.querySelectorAll("[data-switch]"))
        kept.pressed[`${key(figure)} ${one.dataset.switch}`] = one.getAttribute("aria-pressed");
      kept.chosen[key(figure)] = { ...figure.chosen };
      const u = halfstep.drawn.get(figure);
      const { min, max } = u.scales.x;
      const xs = u.data[0];
      if (min > xs[0] || max < xs[xs.length - 1]) kept.zoom[key(figure)] = { min, max };
    });
    return kept;
  }

  function restore(kept) {
    each("details", (one, i) => { one.open = kept.open[i] ?? one.open; });
    each("figure", (figure) => {
      for (const one of figure.querySelectorAll("[data-switch]")) {
        const before = kept.pressed[`${key(figure)} ${one.dataset.switch}`];
        if (before) one.setAttribute("aria-pressed", before);
      }
      figure.chosen = kept.chosen[key(figure)] ?? {};
    });
    halfstep.start();
    each("figure", (figure) => {
      if (kept.zoom[key(figure)]) halfstep.drawn.get(figure).setScale("x", kept.zoom[key(figure)]);
    });
    if (kept.focus >= 0) controls()[kept.focus]?.focus({ preventScroll: true });
  }

  function swap(text) {
    const newer = new DOMParser().parseFromString(text, "text/html");
    const kept = remember();
    document.title = newer.title;
    for (const part of ["header", "main", "footer"])
      document.querySelector(part).replaceWith(newer.querySelector(part));
    document.getElementById("data").textContent = newer.getElementById("data").textContent;
    restore(kept);
  }

  function say(words, over = false) {
    live.textContent = words;
    live.classList.toggle("over", over);
  }

  const now = () => new Date().toLocaleTimeString();

  async function ask() {
    const began = performance.now();
    const busy = document.hidden || held || document.activeElement?.tagName === "SELECT";
    if (!busy) {
      try {
        const answer = await fetch("/", tag ? { headers: { "If-None-Match": tag } } : {});
        if (answer.status === 200) {
          swap(await answer.text());
          tag = answer.headers.get("ETag");
          say(`live, as of ${now()}`);
        } else if (answer.status !== 304) say(`not updated since: ${await answer.text()}`, true);
      } catch {
        say("no longer live: halfstep watch has ended", true);
      }
    }
    setTimeout(ask, Math.max(EVERY, 5 * (performance.now() - began)));
  }

  setTimeout(ask, EVERY);
})();
