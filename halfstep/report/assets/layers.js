// Draws maps: of layers by steps, and of exponents by steps. One cell is one number; the key says what colors mean.
(() => {
  "use strict";

  const { ink, whole, digits, superscript } = halfstep;
  const LOW_BYTES_FIRST = { Float32Array, Uint16Array };
  const OCTAVE = 2048; // of the codes of shares, as in layers.py
  const PLURAL = { activation: "activations", gradient: "gradients", weight: "weights" };

  const unpack = (text, kind) =>
    new LOW_BYTES_FIRST[kind](Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0)).buffer);

  // ---- how numbers are written and colored

  const percent = (share) => `${digits(100 * share, 3)} %`;
  const bits = (value) => `${digits(value, 3)} bits`;
  const power = (value) => (value === 0 ? "0" : value.toPrecision(3));

  // A bin holds what is above its bound; the key shows them from good to bad, or from little to much.
  const SHARE = {
    bounds: [0.5, 0.1, 0.01, 0.001, 0], words: ["over 50 %", "10 to 50 %", "1 to 10 %", "0.1 to 1 %", "under 0.1 %", "none"],
    colors: ["--bad-5", "--bad-4", "--bad-3", "--bad-2", "--bad-1", "--bad-0"],
  };
  const ROOM = {
    bounds: [16, 8, 4, 2, 0], words: ["16 bits or more", "8 to 16", "4 to 8", "2 to 4", "0 to 2", "beyond the format"],
    colors: ["--bad-0", "--bad-1", "--bad-2", "--bad-3", "--bad-4", "--bad-5"],
  };
  const SIZE = {
    bounds: [1e-2, 1e-3, 1e-4, 1e-5, 0], words: ["over 1 %", "0.1 to 1 %", "0.01 to 0.1 %", "0.001 to 0.01 %", "under 0.001 %", "none"],
    colors: ["--tone-5", "--tone-4", "--tone-3", "--tone-2", "--tone-1", "--tone-0"],
  };
  const bin = (scale, value) => {
    const at = scale.bounds.findIndex((bound) => value > bound || (scale === ROOM && value === bound));
    return at < 0 ? scale.bounds.length : at;
  };

  const ordered = (scale) => {
    const pairs = scale.words.map((words, i) => [words, scale.colors[i]]);
    return scale === ROOM ? pairs : pairs.reverse();
  };

  // ---- what can be shown

  const room = (role) => ({
    id: `${role}.amax`, name: `headroom of ${PLURAL[role]}`, scale: ROOM, formats: true, role,
  });
  const share = (role, what, name) => ({ id: `${role}.${what}`, name: `${PLURAL[role]} that ${name}`, scale: SHARE, write: percent });
  const VIEWS = {
    headroom: [
      room("activation"), room("gradient"),
      share("activation", "overflow", "overflow"), share("gradient", "overflow", "overflow"),
      share("activation", "underflow", "become zero"), share("gradient", "underflow", "become zero"),
    ],
    updates: [
      { id: "weight.lost", name: "updates that are lost", scale: SHARE, write: percent },
      { id: "weight.update", name: "size of the update, relative to the weight", scale: SIZE, write: power },
    ],
  };

  // Names in the choices of a figure: value -> words. The first is the default.
  function offered(figure) {
    const { layers } = halfstep.data;
    const formats = Object.keys(layers.ranges);
    const compared = ["fp16", "bf16", "e5m2", "e4m3"].filter((name) => formats.includes(name));
    if (figure.dataset.map === "exponents") {
      const roles = Object.keys(layers.histograms).filter((role) => layers.histograms[role].some(Boolean));
      const own = layers.formats[roles[0]][layers.first].split(":")[0];
      const named = compared.map((name) => [name, name]);
      const far = (layers.ranges[own]?.largest ?? 0) > 100; // the ends of fp32 and bf16 are nowhere near: fp16's tell more
      return {
        layer: layers.names.map((name, i) => [String(i), name]),
        role: roles.map((role) => [role, PLURAL[role]]),
        format: far ? [...named, ["own", "its own format"]] : [["own", "its own format"], ...named],
      };
    }
    const views = VIEWS[figure.dataset.map].filter(({ id }) => layers.watched.includes(id));
    const wide = compared.filter((name) => !layers.ranges[name].scaled);
    return {
      view: views.map(({ id, name }) => [id, name]),
      format: [["own", "its own format"], ...[...wide, "e5m2", "e4m3"].map((name) => [name, layers.ranges[name].scaled ? `${name}, unscaled` : name])],
    };
  }

  halfstep.prepareMap = (figure) => {
    const choices = offered(figure);
    figure.chosen ??= {};
    for (const select of figure.querySelectorAll("[data-choice]")) {
      const name = select.dataset.choice;
      select.replaceChildren(...choices[name].map(([value, words]) => new Option(words, value)));
      if (choices[name].some(([value]) => value === figure.chosen[name])) select.value = figure.chosen[name];
      else if (name === "layer") select.value = String(halfstep.data.layers.first);
      figure.chosen[name] = select.value;
      select.addEventListener("change", () => {
        figure.chosen[name] = select.value;
        halfstep.drawMap(figure);
      });
    }
    figure.querySelector("[data-csv]").addEventListener("click", () => {
      const map = mapOf(figure);
      halfstep.save(figure.dataset.map, map.csv());
    });
    figure.querySelector(".plot").addEventListener("keydown", (event) => move(figure, event));
  };

  // ---- a map: columns of steps, rows, and a number in each cell

  function layerMap(figure) {
    const { layers } = halfstep.data;
    const view = VIEWS[figure.dataset.map].find(({ id }) => id === figure.chosen.view);
    const columns = layers.last.length;
    const stored = layers.views[view.id];
    const values = stored ? unpack(stored, "Float32Array") : new Float32Array(layers.names.length * columns);
    const format = (row) => (figure.chosen.format === "own" ? layers.formats[view.role][row] : figure.chosen.format);
    const top = (row) => {
      const known = layers.ranges[format(row).split(":")[0]];
      return !known || (known.scaled && figure.chosen.format === "own") ? NaN : known.largest;
    };
    const tops = view.formats ? layers.names.map((_, row) => top(row)) : null;
    const at = (row, column) => {
      const value = values[row * columns + column];
      return tops ? tops[row] - Math.log2(value) : value;
    };
    const write = (row, column) => {
      const value = values[row * columns + column];
      if (Number.isNaN(value)) return "nothing recorded";
      if (!tops) return view.write(value);
      const largest = `the largest is ${value.toPrecision(3)}`;
      if (Number.isNaN(tops[row])) return `scaled into ${format(row)}; ${largest}`;
      return value === 0 ? "only zeros" : `${bits(at(row, column))} in ${format(row)}; ${largest}`;
    };
    const csv = () => [
      ["layer", "kind", "after_step", "to_step", view.id],
      ...layers.names.flatMap((name, row) =>
        layers.last.map((last, column) => [name, layers.kinds[row], layers.after[column], last, values[row * columns + column]])),
    ];
    const color = (row, column) => {
      const value = at(row, column);
      return Number.isNaN(value) ? null : view.scale.colors[bin(view.scale, value)];
    };
    return {
      rows: layers.names.length, columns, after: layers.after, last: layers.last, color, write, csv,
      key: ordered(view.scale),
      name: (row) => layers.names[row], label: (row) => layers.names[row],
    };
  }

  function exponentMap(figure) {
    const { layers } = halfstep.data;
    const { layer, role, format } = figure.chosen;
    const own = layers.formats[role][layer];
    const chosen = format === "own" ? own.split(":")[0] : format;
    const histogram = layers.histograms[role][layer] ?? { low: 0, width: 1, codes: "" };
    const steps = layers.samples.steps;
    const codes = histogram.codes ? unpack(histogram.codes, "Uint16Array") : new Uint16Array(steps.length);
    const high = histogram.low + histogram.width - 1;
    const lines = ends(layers.ranges[chosen], chosen, high);
    // Ends of the format that lie far away are left out.
    const near = lines.map(({ at }) => at).filter((at) => at > histogram.low - 16 && at < high + 20);
    const lowest = Math.floor(Math.min(histogram.low, ...near)) - 1;
    const highest = Math.ceil(Math.max(high + 1, ...near)) + 1;
    const part = (row, column) => {
      const place = highest - 1 - row - histogram.low;
      const code = place >= 0 && place < histogram.width ? codes[column * histogram.width + place] : 0;
      return code ? 2 ** ((code - 65535) / OCTAVE) : 0;
    };
    const main = ink("--main");
    const shade = (row, column) => {
      const value = part(row, column);
      return value ? `color-mix(in srgb, ${main} ${Math.round(100 * Math.max(0.06, 1 + Math.log2(value) / 14))}%, transparent)` : null;
    };
    const gaps = steps.map((step, i) => (i ? steps[i - 1] : step - Math.max(1, (steps[1] ?? step + 1) - step)));
    const rows = highest - lowest;
    return {
      rows, columns: steps.length, after: gaps, last: steps, color: shade, mixed: true,
      write: (row, column) => {
        const why = layers.samples.why[column];
        return `${part(row, column) ? percent(part(row, column)) : "none"} of the ${PLURAL[role]}${why === "schedule" ? "" : ` (${why})`}`;
      },
      csv: () => [["layer", "role", "step", "exponent", "share"],
        ...steps.flatMap((step, column) => Array.from({ length: histogram.width }, (_, place) =>
          [layers.names[layer], role, step, histogram.low + place, part(highest - 1 - histogram.low - place, column).toPrecision(4)]))],
      key: [["1 in 16,000 or fewer", 6], ["1 in 500", 36], ["1 in 16", 71], ["all", 100]].map(([words, much]) => [words, `color-mix(in srgb, ${main} ${much}%, transparent)`]),
      name: (row) => `2${superscript(String(highest - 1 - row))}`,
      label: (row) => ((highest - 1 - row) % 4 === 0 ? `2${superscript(String(highest - 1 - row))}` : null),
      single: true, at: "sampled at step", lines: lines.map((line) => ({ ...line, row: highest - line.at })), highest,
    };
  }

  // Where a format ends. A narrow one is scaled, here so that its largest number meets the largest of the tensor.
  function ends(range, name, high) {
    if (!range) return [];
    const shift = range.scaled ? high + 1 - range.largest : 0;
    const words = range.scaled ? `${name}, scaled` : name;
    return [
      { at: range.largest + shift, words: `${words}: largest` },
      { at: range.normal + shift, words: "smallest with full precision" },
      { at: range.smallest + shift, words: "smallest" },
    ];
  }

  const mapOf = (figure) => (figure.dataset.map === "exponents" ? exponentMap : layerMap)(figure);

  // ---- drawing

  // One pixel per cell; the browser enlarges it.
  function image(map) {
    const canvas = document.createElement("canvas");
    canvas.width = map.columns;
    canvas.height = map.rows;
    const ctx = canvas.getContext("2d");
    const inks = new Map();
    for (let row = 0; row < map.rows; row += 1)
      for (let column = 0; column < map.columns; column += 1) {
        const color = map.color(row, column);
        if (!color) continue;
        if (!inks.has(color)) inks.set(color, map.mixed ? color : ink(color));
        ctx.fillStyle = inks.get(color);
        ctx.fillRect(column, row, 1, 1);
      }
    return canvas;
  }

  function paint(map, picture) {
    return (u) => {
      const { ctx, bbox } = u;
      ctx.save();
      ctx.beginPath();
      ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
      ctx.clip();
      ctx.fillStyle = ink(map.single ? "--card" : "--faint");
      ctx.fillRect(bbox.left, bbox.top, bbox.width, bbox.height);
      ctx.imageSmoothingEnabled = false;
      for (let column = 0; column < map.columns; column += 1) {
        const left = Math.round(u.valToPos(map.after[column], "x", true));
        const right = Math.round(u.valToPos(map.last[column], "x", true));
        ctx.drawImage(picture, column, 0, 1, map.rows, left, bbox.top, Math.max(1, right - left), bbox.height);
      }
      const height = bbox.height / map.rows;
      if (height > 6 * uPlot.pxRatio && !map.single) { // rows are told apart by a line of paper
        ctx.fillStyle = ink("--paper");
        for (let row = 1; row < map.rows; row += 1)
          ctx.fillRect(bbox.left, Math.round(bbox.top + row * height), bbox.width, uPlot.pxRatio);
      }
      for (const line of map.lines ?? []) rule(u, bbox.top + line.row * height, line.words);
      ctx.restore();
    };
  }

  function rule({ ctx, bbox }, y, words) {
    if (y < bbox.top || y > bbox.top + bbox.height) return;
    ctx.strokeStyle = ctx.fillStyle = ink("--held-out");
    ctx.lineWidth = uPlot.pxRatio;
    ctx.setLineDash([4 * uPlot.pxRatio, 4 * uPlot.pxRatio]);
    ctx.beginPath();
    ctx.moveTo(bbox.left, y);
    ctx.lineTo(bbox.left + bbox.width, y);
    ctx.stroke();
    ctx.font = `${11 * uPlot.pxRatio}px ${getComputedStyle(document.body).fontFamily}`;
    ctx.textAlign = "right";
    const below = y < bbox.top + 16 * uPlot.pxRatio;
    ctx.textBaseline = below ? "top" : "bottom";
    ctx.setLineDash([]);
    ctx.strokeStyle = ink("--card"); // words stay readable on strong colors
    ctx.lineWidth = 4 * uPlot.pxRatio;
    ctx.lineJoin = "round";
    ctx.strokeText(words, bbox.left + bbox.width - 6 * uPlot.pxRatio, y + (below ? 2 : -2) * uPlot.pxRatio);
    ctx.fillText(words, bbox.left + bbox.width - 6 * uPlot.pxRatio, y + (below ? 2 : -2) * uPlot.pxRatio);
  }

  // A name that does not fit loses its middle: both ends tell layers apart.
  function elide(text, most) {
    if (text.length <= most) return text;
    const head = Math.ceil((most - 1) / 3);
    return `${text.slice(0, head)}…${text.slice(text.length - (most - 1 - head))}`;
  }

  function rowAxis(map, width, height) {
    const most = map.single ? 6 : Math.max(10, Math.min(34, Math.floor((width * 0.36) / 6.4)));
    const every = map.single ? 1 : Math.ceil(12 / (height / map.rows));
    const shown = [];
    for (let row = 0; row < map.rows; row += 1) {
      const label = map.label(row);
      if (label != null && (map.single || row % every === 0)) shown.push([map.rows - row - 0.5, elide(label, most)]);
    }
    const longest = Math.max(4, ...shown.map(([, label]) => label.length));
    return {
      ...halfstep.axis(), size: Math.round(longest * 6.4 + 12), gap: 6, grid: { show: false },
      font: `${map.single ? 12 : 11}px ${getComputedStyle(document.body).fontFamily}`,
      splits: () => shown.map(([at]) => at).reverse(),
      values: () => shown.map(([, label]) => label).reverse(),
      filter: (_, ticks) => ticks,
    };
  }

  // The cell that a reader points at, here or in another figure with the same rows: cursors of all charts move together.
  function readCell(figure, u, map) {
    const plot = figure.querySelector(".plot");
    const cell = cellAt(u, map);
    if (cell && plot.matches(":hover")) {
      figure.keyed = false;
      return cell;
    }
    if (figure.keyed && plot.matches(":focus")) return figure.cell; // the mouse rests somewhere else
    const others = [...document.querySelectorAll('[data-map]:not([data-map="exponents"])')];
    const read = (one) => one.querySelector(".plot:hover") || (one.keyed && one.querySelector(".plot:focus"));
    return others.includes(figure) && others.some(read) ? cell : null;
  }

  // The cell under the cursor, or null.
  function cellAt(u, map) {
    const { left, top } = u.cursor;
    if (left == null || left < 0 || top < 0) return null;
    const step = u.posToVal(left, "x");
    const row = Math.min(map.rows - 1, Math.max(0, Math.floor(map.rows - u.posToVal(top, "y"))));
    const column = map.last.findIndex((last) => step <= last);
    return { row, column: column < 0 ? map.columns - 1 : column };
  }

  function read(figure, map, cell) {
    const reading = figure.querySelector(".reading");
    reading.classList.toggle("at-rest", !cell);
    if (!cell) {
      const touch = matchMedia("(hover: none)").matches;
      reading.textContent = touch ? "Tap a cell for its numbers." : "Point at a cell for its numbers; arrow keys move from cell to cell.";
      return;
    }
    const [after, last] = [map.after[cell.column], map.last[cell.column]];
    const when = map.at ? `${map.at} ${whole(last)}` : last - after > 1 ? `steps ${whole(after + 1)} to ${whole(last)}` : `step ${whole(last)}`;
    reading.textContent = `${map.name(cell.row)}, ${when}: ${map.write(cell.row, cell.column)}`;
  }

  function move(figure, event) {
    const by = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (!by) return;
    event.preventDefault();
    const u = halfstep.drawn.get(figure);
    const map = figure.map;
    const cell = figure.cell ?? { row: by[1] < 0 ? map.rows : -1, column: map.columns - 1 };
    const column = Math.min(map.columns - 1, Math.max(0, cell.column + by[0]));
    const row = Math.min(map.rows - 1, Math.max(0, cell.row + by[1]));
    figure.keyed = true;
    figure.cell = { row, column }; // now: the cursor moves a moment later, and keys may come faster
    const middle = (map.after[column] + map.last[column]) / 2;
    u.setCursor({ left: u.valToPos(middle, "x"), top: u.valToPos(map.rows - row - 0.5, "y") });
  }

  function key(figure, map) {
    figure.querySelector(".key").replaceChildren(...map.key.map(([words, color]) => {
      const item = document.createElement("li");
      const swatch = document.createElement("span");
      swatch.className = "swatch cell";
      swatch.style.background = color.startsWith("--") ? `var(${color})` : color;
      item.append(swatch, words);
      return item;
    }));
  }

  halfstep.drawMap = (figure) => {
    const plot = figure.querySelector(".plot");
    const map = (figure.map = mapOf(figure));
    figure.cell = null;
    const format = figure.querySelector('[data-choice="format"]');
    if (format && figure.dataset.map === "headroom") format.parentElement.hidden = !figure.chosen.view.endsWith("amax");
    const inside = map.single ? 320 : Math.min(680, Math.max(90, map.rows * 15));
    plot.style.height = `${inside + 38}px`;
    key(figure, map);
    read(figure, map, null);
    const options = {
      width: plot.clientWidth, height: inside + 38, padding: [8, 26, 0, 0],
      scales: { x: { time: false, range: (_, low, high) => [Math.min(low, map.last[map.columns - 1] - 1), high] }, y: { range: [0, map.rows] } },
      axes: [halfstep.stepAxis(), rowAxis(map, plot.clientWidth, inside)],
      series: [{}, { paths: () => null, points: { show: false } }],
      legend: { show: false },
      cursor: { y: !map.single, sync: { key: "step", scales: ["x", null] }, points: { show: false }, drag: { x: true, y: false } },
      hooks: {
        drawAxes: [paint(map, image(map))],
        setCursor: [(u) => { figure.cell = readCell(figure, u, map); read(figure, map, figure.cell); }],
      },
    };
    halfstep.show(figure, options, [[map.after[0], ...map.last], [null, ...map.last.map(() => null)]]);
  };
})();
