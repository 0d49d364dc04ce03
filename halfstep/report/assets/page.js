// Draws the charts of the report. The data is in #data, the colors in the style sheet, the words in the page.
// layers.js draws the maps with what this file offers, start.js starts both, watch.js starts them again.
const halfstep = (() => {
  "use strict";

  const drawn = new Map(); // figure -> uPlot
  const page = { data: null, drawn };

  // ---- how numbers are written

  const digits = (value, n) =>
    Math.abs(value) >= 10 ** n ? String(Math.round(value)) : String(Number(value.toPrecision(n)));
  const inUnits = (value, n, base, units) => {
    let power = 0;
    // Half a unit of the last digit early: 999,999 is 1M, and 1,024 KiB is 1 MiB.
    const full = base * (base === 1000 ? 1 - 0.5 / 10 ** n : 1);
    while (power < units.length - 1 && Math.abs(value) >= full) {
      value /= base;
      power += 1;
    }
    return digits(value, n) + units[power];
  };
  const small = (value, n) =>
    value !== 0 && Math.abs(value) < 1e-3
      ? value.toExponential(n - 1).replace(/\.?0+e/, "e")
      : Math.abs(value) >= 1e5 ? inUnits(value, n, 1000, ["", "k", "M", "B", "T"]) : digits(value, n);
  const superscript = (text) => text.replace(/./g, (c) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[c] ?? "⁻");
  const power = (value) => {
    const exponent = Math.log2(value);
    return Number.isInteger(exponent) ? `2${superscript(String(exponent))}` : digits(value, 4);
  };
  const writers = {
    plain: small,
    count: (value, n) => inUnits(value, n, 1000, ["", "k", "M", "B", "T"]),
    size: (value, n) => inUnits(value, n, 1024, [" B", " KiB", " MiB", " GiB", " TiB"]),
    power,
  };

  // ---- axes

  // Ticks of a logarithmic axis: every power of the base when they are many, else rounder steps in between.
  function logTicks(low, high, base) {
    const from = Math.floor(Math.log(low) / Math.log(base) + 1e-9);
    const to = Math.ceil(Math.log(high) / Math.log(base) - 1e-9);
    const every = Math.max(1, Math.ceil((to - from) / 7));
    let within = [1];
    if (base === 10 && to - from <= 3) within = high / low < 4 ? [1, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9] : [1, 2, 3, 5];
    const ticks = [];
    for (let exponent = from; exponent <= to; exponent += every)
      for (const step of within) ticks.push(step * base ** exponent);
    return ticks.filter((tick) => tick >= low * 0.9999 && tick <= high * 1.0001);
  }

  // A linear axis of a quantity starts at zero, that of a loss just below its smallest value.
  function range(unit, log, fromZero) {
    return (_, low, high) => {
      if (low == null) return [0.9, 1.1];
      if (log) {
        const room = unit === "power" || low === high ? 2 : Math.max(1.05, (high / low) ** 0.06);
        return [low / room, high * room];
      }
      const room = (high - low || Math.abs(high) || 1) * 0.06;
      return [fromZero && low >= 0 ? 0 : low - room, high + room];
    };
  }

  const ink = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  const axis = () => ({
    stroke: ink("--quiet"),
    font: `12px ${getComputedStyle(document.body).fontFamily}`,
    grid: { stroke: ink("--line"), width: 1 },
    ticks: { show: false },
  });

  // Steps are whole numbers.
  function stepAxis() {
    const whole = [];
    for (let ten = 1; ten < 1e12; ten *= 10) whole.push(ten, 2 * ten, 5 * ten);
    return {
      ...axis(), size: 30, gap: 6, space: 64, incrs: whole,
      grid: { show: false },
      values: (_, ticks) => ticks.map((tick) => tick.toLocaleString("en-US")),
    };
  }

  function axes(chart, log) {
    const write = writers[chart.unit];
    const shared = axis();
    const y = { ...shared, size: { size: 68, power: 40 }[chart.unit] ?? 48, gap: 6, values: (_, ticks) => ticks.map((tick) => write(tick, 3)) };
    if (log) {
      const base = chart.unit === "power" ? 2 : 10;
      y.splits = (_, __, low, high) => logTicks(low, high, base);
      y.filter = (_, ticks) => ticks;
    } else if (chart.unit === "size") {
      y.incrs = Array.from({ length: 46 }, (_, i) => 2 ** i);
    }
    return [stepAxis(), y];
  }

  // ---- lines

  function lines(chart, smooth) {
    return chart.lines.map(({ label, look, x }) => {
      const color = ink(`--${look === "smooth" ? "main" : look}`);
      const dots = (size, fill = color) => ({ show: true, size, width: 1.5, fill, stroke: color });
      // One point has no line to be seen by; very many are a band, which a thick line would fill.
      const line = { label, stroke: color, width: x.length > 800 ? 1 : 1.75, points: x.length === 1 ? dots(6) : { show: false } };
      switch (look) {
        case "raw": // the main line until a smooth one lies over it
          return smooth ? { ...line, width: 1 } : { ...line, stroke: ink("--main"), width: 1.25 };
        case "smooth":
          return { ...line, width: 1.75, show: smooth };
        case "held-out":
          return x.length > 60 ? line : { ...line, points: dots(6, ink("--paper")) };
        case "reference":
          return { ...line, width: 1.25, dash: [5, 4] };
        case "event": // it has a step and no value: `upright` draws it
          return { ...line, paths: () => null, points: { show: false } };
        case "mark":
          return { ...line, paths: () => null, points: { ...dots(8), width: 0 } };
        default: // a loss scale holds until it changes: steps, not slopes
          return chart.unit === "power" ? { ...line, paths: uPlot.paths.stepped({ align: 1 }) } : line;
      }
    });
  }

  // What happened stands over the whole height, behind the lines.
  function upright(chart) {
    const steps = chart.lines.filter(({ look }) => look === "event").flatMap(({ x }) => x);
    return ({ bbox, ctx, valToPos }) => {
      ctx.save();
      ctx.strokeStyle = ink("--mark");
      ctx.lineWidth = uPlot.pxRatio;
      ctx.setLineDash([3 * uPlot.pxRatio, 3 * uPlot.pxRatio]);
      ctx.beginPath();
      for (const step of steps) {
        const x = Math.round(valToPos(step, "x", true)) + 0.5;
        if (x < bbox.left || x > bbox.left + bbox.width + 1) continue; // outside of what is looked at closer
        ctx.moveTo(x, bbox.top);
        ctx.lineTo(x, bbox.top + bbox.height);
      }
      ctx.stroke();
      ctx.restore();
    };
  }

  // The nearest point of a line: lines of one chart need not have a value at the same steps.
  function nearest(u, line, index) {
    const values = u.data[line];
    if (values[index] !== undefined) return index;
    for (let away = 1; away < values.length; away += 1) {
      if (values[index - away] !== undefined && index - away >= 0) return index - away;
      if (values[index + away] !== undefined && index + away < values.length) return index + away;
    }
    return index;
  }

  // ---- the key: last values at rest, those under the cursor while there is one

  const whole = (number) => number.toLocaleString("en-US");

  // What happened at the line next to the cursor.
  function happened(u, chart) {
    const marks = chart.lines.find(({ look }) => look === "event");
    const near = (marks?.x ?? []).map((step, i) => [Math.abs(u.valToPos(step, "x") - u.cursor.left), i]);
    const [away, i] = near.reduce((a, b) => (b[0] < a[0] ? b : a), [Infinity, 0]);
    return away < 6 ? `: ${marks.names[i]}${marks.x[i] === u.data[0][u.cursor.idx] ? "" : ` at ${whole(marks.x[i])}`}` : "";
  }

  function follow(figure, chart) {
    const cells = [...figure.querySelectorAll("[data-line]")];
    const at = figure.querySelector(".at");
    return (u) => {
      const index = u.cursor.idx;
      at.textContent = index == null ? "" : `step ${whole(u.data[0][index])}${happened(u, chart)}`;
      for (const cell of cells) {
        const line = Number(cell.dataset.line) + 1;
        if (index == null || ["mark", "event"].includes(chart.lines[line - 1].look)) {
          cell.textContent = cell.dataset.last;
          continue;
        }
        const value = u.data[line][u.cursor.idxs[line] ?? index];
        cell.textContent = value == null ? "not finite" : writers[chart.unit](value, 4);
      }
    };
  }

  function prepare(figure) {
    const at = document.createElement("li");
    at.className = "at";
    figure.querySelector(".key").append(at);
    for (const cell of figure.querySelectorAll("[data-line]")) cell.dataset.last = cell.textContent;
    for (const button of figure.querySelectorAll(".switch")) {
      button.addEventListener("click", () => {
        button.setAttribute("aria-pressed", String(!isOn(figure, button.dataset.switch)));
        draw(figure);
      });
    }
    figure.querySelector("[data-csv]").addEventListener("click", () => {
      const chart = page.data.charts[figure.dataset.chart];
      const rows = chart.lines.flatMap(({ label, x, y, names }) => x.map((step, i) => [label, step, names?.[i] ?? y[i]]));
      save(figure.dataset.chart, [["line", "step", "value"], ...rows]);
    });
  }

  // ---- numbers as a file

  const field = (value) => {
    const text = value == null || Number.isNaN(value) ? "" : String(value);
    return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };

  function save(name, rows) {
    const text = rows.map((row) => row.map(field).join(",")).join("\n");
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([`${text}\n`], { type: "text/csv" }));
    link.download = `${document.title.split(":")[0].replace(/[^\w.-]+/g, "_")}-${name}.csv`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
  }

  const isOn = (figure, name) =>
    figure.querySelector(`[data-switch="${name}"]`)?.getAttribute("aria-pressed") === "true";

  // ---- drawing

  function draw(figure) {
    const plot = figure.querySelector(".plot");
    const chart = page.data.charts[figure.dataset.chart];
    const smooth = isOn(figure, "smooth");
    const log = chart.log || isOn(figure, "log");
    for (const swatch of figure.querySelectorAll(".swatch.smooth")) swatch.parentElement.hidden = !smooth;

    // On a logarithmic axis there is no zero; what is not positive is left out, as a gap.
    const shown = (y) => (log ? y.map((value) => (value > 0 ? value : null)) : y);
    const data = uPlot.join(chart.lines.map(({ x, y }) => [x, shown(y)]));
    const options = {
      width: plot.clientWidth,
      height: plot.clientHeight,
      padding: [8, 26, 0, 0],
      scales: {
        x: { time: false },
        y: { distr: log ? 3 : 1, log: chart.unit === "power" ? 2 : 10, range: range(chart.unit, log, figure.dataset.chart !== "loss") },
      },
      axes: axes(chart, log),
      series: [{}, ...lines(chart, smooth)],
      legend: { show: false },
      cursor: {
        y: false,
        sync: { key: "step", scales: ["x", null] },
        dataIdx: nearest,
        // A reference has no point of its own under the cursor.
        points: { size: (_, line) => (chart.lines[line - 1].look === "reference" ? 0 : 7), width: 1.5 },
      },
      hooks: { setCursor: [follow(figure, chart)], drawAxes: [upright(chart)] },
    };
    show(figure, options, data);
  }

  function show(figure, options, data) {
    drawn.get(figure)?.destroy();
    drawn.set(figure, new uPlot(options, data, figure.querySelector(".plot")));
  }

  return Object.assign(page, { draw, prepare, show, save, ink, axis, stepAxis, whole, digits, superscript });
})();
