// Starts the charts and the maps, and draws them again when the colors or the width change.
(() => {
  "use strict";

  const figures = () => [...document.querySelectorAll("figure[data-chart], figure[data-map]")];
  const draw = (figure) => (figure.dataset.map ? halfstep.drawMap : halfstep.draw)(figure);
  const drawAll = () => figures().forEach(draw);

  const resized = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      const u = halfstep.drawn.get(target.parentElement);
      if (!u || !target.clientWidth || u.width === target.clientWidth) continue;
      // Names beside a map take as much room as they need: it is drawn anew.
      if (target.parentElement.dataset.map) draw(target.parentElement);
      else u.setSize({ width: target.clientWidth, height: target.clientHeight });
    }
  });

  halfstep.start = () => {
    halfstep.data = JSON.parse(document.getElementById("data").textContent);
    resized.disconnect();
    halfstep.drawn.forEach((u) => u.destroy());
    halfstep.drawn.clear();
    for (const figure of figures()) {
      (figure.dataset.map ? halfstep.prepareMap : halfstep.prepare)(figure);
      draw(figure);
      resized.observe(figure.querySelector(".plot"));
    }
    document.querySelector('[data-table="what-if"] [data-csv]')?.addEventListener("click", () => {
      const head = ["layer", "role", "format", "sqnr_db", "overflow", "underflow"];
      halfstep.save("what-if", [head, ...halfstep.data.what_if]);
    });
  };

  document.documentElement.classList.add("live");
  halfstep.start();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  matchMedia("print").addEventListener("change", drawAll);
})();
