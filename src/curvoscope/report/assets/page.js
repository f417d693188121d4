"use strict";
(() => {
  const byId = (id) => document.getElementById(id);
  const say = (text) => { byId("sorted").textContent = text; };
  const distinct = (values) => [...new Set(values)];
  const compare = (a, b) => (typeof a === "number" ? a - b : a.localeCompare(b, "en", { numeric: true }));

  /** An element with attributes and children; strings become text, never markup. */
  const maker = (create) => (tag, attributes = {}, ...children) => {
    const element = create(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (typeof value === "function") element.addEventListener(name, value);
      else if (value !== null && value !== false) element.setAttribute(name, value);
    }
    element.append(...children.filter((child) => child !== null));
    return element;
  };
  const html = maker((tag) => document.createElement(tag));
  const { namespaceURI } = Object.assign(document.createElement("p"), { innerHTML: "<svg></svg>" }).firstChild;
  const svg = maker((tag) => document.createElementNS(namespaceURI, tag));

  function chooser(label, options, value, change) {
    const select = html("select", { change: () => change(select.value) });
    select.append(...options.map(([key, text]) => html("option", { value: key }, text)));
    select.value = value;
    return [html("label", { class: "field" }, label, " ", select), select];
  }

  // ---- light and dark

  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const root = document.documentElement;
  const isDark = () => (root.dataset.scheme ?? (dark.matches ? "dark" : "light")) === "dark";
  const scheme = html("button", { type: "button", class: "scheme", click: () => paint(isDark() ? "light" : "dark") });
  function paint(chosen) {
    if (chosen) root.dataset.scheme = chosen;
    scheme.textContent = isDark() ? "Light colours" : "Dark colours";
    redraw();
  }

  // ---- numbers, as the tables write them

  const exponential = (value, digits = 2) => value.toExponential(digits).replace(/e([+-])(\d)$/, "e$10$2");
  function written(value, error, run) {
    if (value === 0 && !error) return "0";
    if (value !== 0 && Math.abs(value) <= run.zero && error <= run.zero) return "~0";
    const size = Math.abs(value), percent = error / size;
    const plain = run.exponent || size >= 1e3 || size < 1e-4 ? exponential(value) : String(Number(value.toPrecision(3)));
    if (!error) return plain;
    if (percent >= 10) return `${value === 0 ? "0" : exponential(value, 0)} ±${exponential(error, 0)}`;
    return `${plain} ±${percent < 0.0005 ? "<0.1" : (100 * percent).toFixed(percent < 0.0995 ? 1 : 0)}%`;
  }
  /** Lines break between a number and its error, not behind the hyphen of an exponent. */
  const words = (text) => text.split(" ").flatMap((word, i) => [i ? " " : "", html("span", { class: "unbroken" }, word)]);
  const number = ([value, error], run) =>
    html("data", { value: String(value), "data-stderr": String(error) }, ...words(written(value, error, run)));

  // ---- the runs of the page

  const runs = JSON.parse(byId("data").textContent).runs;
  const known = new Map(runs.flatMap((run) => run.blocks).reverse().map((block) => [block.name, block]));
  const names = distinct(runs.flatMap((run) => run.blocks.map((block) => block.name)));
  const parts = distinct(runs.flatMap((run) => run.rows.map((row) => row.part))).filter(Boolean);
  const quantities = distinct(runs.flatMap((run) => run.rows.flatMap((row) => Object.keys(row.numbers))));
  const titles = distinct(runs.flatMap((run) => run.maps.map((map) => map.title)));
  const state = {
    block: null, // chosen in all views
    other: null, // the other block of a pair
    part: parts.includes("total") ? "total" : parts[0] ?? "",
    step: runs.flatMap((run) => run.maps.filter((map) => map.axis === "step").map((map) => map.columns.at(-1)))[0],
    quantity: quantities[0],
    title: titles[0],
  };

  // ---- tables that sort and filter, and rows that choose a block

  class PageTable {
    constructor(element) {
      this.element = element;
      this.body = element.tBodies[0];
      this.headings = [...element.tHead.rows[0].cells];
      this.columns = this.headings.map((heading) => heading.textContent.trim());
      this.words = this.headings.filter((heading) => !heading.classList.contains("number")).length;
      this.caption = element.caption.textContent.trim();
      const cell = (row, name) => row.cells[this.columns.indexOf(name)]?.textContent.trim() ?? "";
      this.lines = [...this.body.rows].map((row, place) => ({
        row, place, shown: true,
        block: cell(row, "block"), other: cell(row, "with"), layer: cell(row, "layer"), head: cell(row, "head"),
        part: cell(row, "part") || cell(row, "approximation"),
        words: [...row.cells].slice(0, this.words).map((one) => one.textContent.trim()),
      }));
      this.changed = () => {};
      this.headings.forEach((heading, column) => this.sorts(heading, column));
      this.fields = this.filters();
      if (this.fields.length && this.lines.length >= 8) this.tools();
      if (this.columns[0] === "block") this.picks();
    }

    sorts(heading, column) {
      const key = ({ row }) => {
        const found = row.cells[column].querySelector("data");
        return found ? Number(found.value) : row.cells[column].textContent;
      };
      heading.querySelector("button").addEventListener("click", () => {
        const way = heading.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
        // Among numbers, cells without one stay at the end, whichever way the others go.
        this.sort(key, way === "ascending" ? 1 : -1, heading.classList.contains("number"));
        heading.setAttribute("aria-sort", way);
        say(`Sorted by ${heading.textContent}, ${way}.`);
      });
    }

    sort(key, sign, numeric) {
      const last = (a) => numeric && typeof a === "string";
      const keyed = this.lines.map((line) => [key(line), line]);
      keyed.sort(([a], [b]) => last(a) - last(b) || (last(a) ? 0 : sign * compare(a, b)));
      this.lines = keyed.map(([, line]) => line);
      this.body.append(...this.lines.map((line) => line.row));
      this.headings.forEach((one) => one.setAttribute("aria-sort", "none"));
      this.element.classList.remove("parts");
    }

    /** What a row can be chosen by: layer and role of its block, and columns of few words. */
    filters() {
      const linked = this.columns[0] === "block" && this.lines.some((line) => known.has(line.block));
      const fields = linked ? ["layer", "role"].map((name) => [name, (line) => known.get(line.block)?.[name] ?? ""]) : [];
      this.columns.slice(0, this.words).forEach((name, place) => {
        if (!["block", "with"].includes(name)) fields.push([name, (line) => line.words[place]]);
      });
      return fields.map(([name, of]) => ({ name, of, value: "", options: distinct(this.lines.map(of)).filter(Boolean) }))
        .filter(({ options }) => options.length > 1 && options.length < Math.min(this.lines.length, 80));
    }

    tools() {
      const bar = html("div", { class: "tools", role: "group", "aria-label": `Filter: ${this.caption}` });
      for (const field of this.fields) {
        const options = [["", "all"], ...field.options.map((value) => [value, value])];
        const [label, select] = chooser(field.name, options, "", (value) => { field.value = value; this.apply(); });
        field.select = select;
        bar.append(label);
      }
      this.search = html("input", { type: "search", size: 10, input: () => this.apply() });
      bar.append(html("label", { class: "field" }, "contains ", this.search));
      if (this.fields.some((field) => field.name === "role")) {
        const orders = { "": (line) => line.place, layer: this.ordered("layer"), role: this.ordered("role") };
        const options = [["", "as measured"], ["layer", "by layer"], ["role", "by role"]];
        const [label] = chooser("order", options, "", (value) => {
          this.sort(orders[value], 1, false);
          say(`Sorted ${options.find(([key]) => key === value)[1]}.`);
        });
        bar.append(label);
      }
      this.count = html("span", { class: "count" }, `${this.lines.length} rows`);
      bar.append(html("button", { type: "button", click: () => { this.clear(); this.changed(); } }, "Clear"), this.count);
      this.element.closest(".scroll").before(bar);
    }

    /** The place of a row's layer or role among all of them, then its own. */
    ordered(name) {
      const { options } = this.fields.find((field) => field.name === name) ?? { options: [] };
      return (line) => options.indexOf(known.get(line.block)?.[name]) * this.lines.length + line.place;
    }

    apply() {
      const needle = this.search.value.trim().toLowerCase();
      for (const line of this.lines) {
        line.shown = this.fields.every(({ of, value }) => !value || of(line) === value)
          && line.words.some((word) => word.toLowerCase().includes(needle));
        line.row.classList.toggle("out", !line.shown);
      }
      const shown = this.lines.filter((line) => line.shown).length;
      this.count.textContent = `${shown} of ${this.lines.length} rows`;
      say(this.count.textContent);
      this.changed();
    }

    clear() {
      if (!this.search) return;
      const { changed } = this;
      this.changed = () => {};
      this.search.value = "";
      for (const field of this.fields) field.value = field.select.value = "";
      this.apply();
      this.changed = changed;
    }

    /** Rows of known blocks have a button, of which one can be reached by Tab and the others by arrows. */
    picks() {
      for (const line of this.lines.filter(({ block }) => known.has(block))) {
        line.button = html("button", { type: "button", class: "pick", tabindex: -1 }, line.block);
        line.row.cells[0].firstElementChild.replaceChildren(line.button);
        line.row.classList.add("linked");
        line.row.addEventListener("click", () => choose({
          block: line.block, other: known.has(line.other) ? line.other : line.block, part: line.part || state.part,
        }));
        line.button.addEventListener("keydown", (event) => {
          const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
          if (!step) return;
          event.preventDefault();
          const shown = this.lines.filter((one) => one.shown && one.button);
          const next = shown[shown.indexOf(line) + step];
          if (next) { next.button.focus(); next.button.click(); }
        });
      }
    }

    mark() {
      const linked = this.lines.filter((line) => line.button);
      for (const line of this.lines) {
        if (line.button && this.isChosen(line)) line.row.setAttribute("aria-current", "true");
        else line.row.removeAttribute("aria-current");
        if (line.button) line.button.tabIndex = -1;
      }
      const shown = linked.filter((line) => line.shown);
      const reached = shown.find((line) => this.isChosen(line)) ?? shown[0];
      if (reached) reached.button.tabIndex = 0;
    }

    isChosen(line) {
      if (line.part && line.part !== state.part) return false;
      if (!this.columns.includes("with")) return line.block === state.block;
      const pair = [state.block, state.other];
      return state.block !== state.other && pair.includes(line.block) && pair.includes(line.other);
    }

    /** Whether its only number is that of the heat map. */
    get isMapped() { return this.columns.slice(this.words).join() === state.title; }

    /** The rows that say something of the chosen block, its layer or its heads, or of the chosen pair. */
    about() {
      const within = (name, outer) => name === outer || name.startsWith(`${outer}.`);
      const pair = state.block !== state.other;
      return this.lines.filter((line) => {
        if (this.columns.includes("with")) return pair && !this.isMapped && this.isChosen({ ...line, part: "" });
        if (pair) return false;
        if (this.columns[0] === "block") return line.block === state.block;
        if (line.layer) return within(state.block, line.layer);
        return Boolean(line.head) && within(line.head, state.block);
      });
    }
  }

  const tables = [...document.querySelectorAll("table.sortable")].map((element) => new PageTable(element));
  const bench = tables.find((table) => table.element.closest(".bench"));
  const kind = bench?.columns.includes("approximation") ? "approximation" : "part"; // one row of a block

  // ---- one choice for all views

  function choose(change) {
    Object.assign(state, change);
    if (!bench.lines.some((line) => line.shown && bench.isChosen(line)) || !visible().includes(state.other)) bench.clear();
    settle();
    const map = maps[0]?.map;
    say(map && state.block !== state.other ? maps[0].told(state.block, maps[0].column) : `${state.block} ${state.part}`);
  }

  /** What is chosen is one of the rows that the filters leave. */
  function settle() {
    const shown = bench.lines.filter((line) => line.shown && known.has(line.block));
    if (!shown.some((line) => bench.isChosen(line))) {
      const line = shown.find(({ block }) => block === state.block) ?? shown[0];
      state.block = line?.block ?? null;
      state.part = line?.part || state.part;
    }
    if (!visible().includes(state.other)) state.other = state.block;
    update();
  }

  function visible() {
    const shown = new Set(bench.lines.filter((line) => line.shown).map((line) => line.block));
    return names.filter((name) => shown.has(name));
  }

  // ---- scales

  const VIRIDIS = ["440154", "482878", "3e4989", "31688e", "26828e", "1f9e89", "35b779", "6ece58", "b5de2b", "fde725"]
    .map((color) => [0, 2, 4].map((start) => parseInt(color.slice(start, start + 2), 16)));
  function viridis(share) {
    const place = Math.min(Math.max(share, 0), 1) * (VIRIDIS.length - 1), low = Math.min(Math.floor(place), VIRIDIS.length - 2);
    return `rgb(${VIRIDIS[low].map((from, i) => Math.round(from + (place - low) * (VIRIDIS[low + 1][i] - from)))})`;
  }
  const SERIES = ["blue", "orange", "green", "purple", "yellow", "sky", "text"];
  const MARKS = ["circle", "square", "triangle", "diamond"];

  /** From values to shares of an axis, with ticks. */
  function scaleOf(values, logarithmic) {
    const of = logarithmic ? (value) => Math.log10(Math.max(value, 0)) : (value) => value;
    const unit = logarithmic ? 1 : nice((Math.max(...values) - Math.min(...values)) / 4);
    let low = Math.floor(of(Math.min(...values)) / unit), high = Math.ceil(of(Math.max(...values)) / unit);
    if (!Number.isFinite(low + high)) [low, high] = [0, 1];
    if (low === high) high += 1;
    const every = Math.ceil((high - low) / 6), ticks = [];
    for (let tick = low; tick <= high; tick += every) {
      ticks.push([(tick - low) / (high - low), logarithmic ? `1e${tick}` : String(Number((tick * unit).toPrecision(6)))]);
    }
    return { at: (value) => (of(value) / unit - low) / (high - low), ticks };
  }
  function nice(step) {
    const power = 10 ** Math.floor(Math.log10(step || 1));
    return power * [1, 2, 5, 10].find((factor) => factor * power >= (step || 1) * 0.999);
  }

  // ---- heat maps, one for each run, on one scale of colours

  class HeatMap {
    constructor(run, place) {
      this.run = run;
      this.places = new Map(run.blocks.map((block, i) => [block.name, i]));
      this.canvas = html("canvas", { "aria-hidden": "true" });
      this.note = html("p", { class: "note", id: `note${place}` });
      this.box = html("div", {
        class: "map", tabindex: 0, role: "application", "aria-describedby": this.note.id,
        keydown: (event) => this.key(event), click: (event) => this.pick(this.under(event)),
        pointermove: (event) => this.tell(this.under(event)), pointerleave: () => this.tell(null),
      }, this.canvas);
      this.element = html("div", {}, run.label ? html("h3", {}, run.label) : null, this.box, this.note);
    }

    get map() {
      const found = this.run.maps.filter((map) => map.title === state.title);
      return found.find((map) => map.part === state.part) ?? found[0];
    }
    get columns() { return this.map.axis === "block" ? visible() : this.map.columns; }
    get column() { return state[{ block: "other" }[this.map.axis] ?? this.map.axis]; }

    /** Value and standard error; null if there are none. Of a symmetric map the lower triangle is stored. */
    cell(row, column, map = this.map) {
      const square = map.axis === "block";
      let i = this.places.get(row) ?? -1, j = square ? this.places.get(column) ?? -1 : map.columns.indexOf(column);
      if (i < 0 || j < 0) return null;
      if (square && j > i) [i, j] = [j, i];
      const index = square ? (i * (i + 1)) / 2 + j : i * map.columns.length + j;
      return map.values[index] === null ? null : [map.values[index], map.errors[index]];
    }

    told(row, column) {
      const found = this.cell(row, column), { axis, part } = this.map;
      const where = axis === "block" && row === column ? row : `${row}, ${axis === "step" ? "step " : ""}${column}`;
      const absent = !this.places.has(row) || (axis === "block" && !this.places.has(column));
      const what = found ? written(...found, this.run) : absent ? "not in this run" : "not measured";
      return `${where}${part ? `, ${part}` : ""}: ${what}`;
    }

    layout() {
      const width = this.box.clientWidth, rows = visible(), columns = this.columns, square = this.map.axis === "block";
      const pen = this.canvas.getContext("2d");
      pen.font = "bold 11px system-ui, sans-serif";
      const widest = (labels) => Math.min(Math.max(0, ...labels.map((label) => pen.measureText(short(label)).width)) + 8, 0.34 * width);
      let left = widest(rows), cell = Math.min(44, (width - left - 2) / Math.max(columns.length, 1));
      const named = !square || cell >= 11;
      if (!named) {
        left = widest(rows.map((name) => called(known.get(name).layer)));
        cell = (width - left - 2) / columns.length;
      }
      const tall = square ? cell : 22, bottom = named ? widest(columns) : 4;
      return { pen, width, rows, columns, left, wide: cell, tall, named, height: rows.length * tall + bottom + 2 };
    }

    draw() {
      this.box.hidden = !this.map || !visible().length;
      if (!this.map) { this.note.textContent = "This run has no such map."; return; }
      this.box.setAttribute("aria-label", `Heat map of ${this.map.title}${this.run.label ? ` in ${this.run.label}` : ""}: `
        + "arrow keys choose a row and a column, Home and End the first and last column");
      if (this.box.hidden) { this.note.textContent = "No block passes the filters."; return; }
      const { pen, width, rows, columns, left, wide, tall, named, height } = this.layout();
      const ratio = window.devicePixelRatio || 1, ink = colours();
      Object.assign(this.canvas, { width: Math.round(width * ratio), height: Math.round(height * ratio) });
      Object.assign(this.canvas.style, { width: `${width}px`, height: `${height}px` });
      pen.setTransform(ratio, 0, 0, ratio, 0, 0);
      const { color } = heat();
      const gap = wide > 6 ? 1 : 0;
      rows.forEach((row, i) => columns.forEach((column, j) => {
        const found = this.cell(row, column);
        if (!found) return;
        pen.fillStyle = color(found[0], this.run) ?? ink.zero;
        pen.fillRect(left + j * wide, 1 + i * tall, wide - gap, tall - gap);
      }));
      pen.font = "11px system-ui, sans-serif";
      pen.textBaseline = "middle";
      const chosen = rows.indexOf(state.block), across = columns.indexOf(this.column);
      const write = (text, x, y, turned, strong) => {
        pen.save();
        pen.translate(x, y);
        if (turned) pen.rotate(-Math.PI / 2);
        pen.textAlign = "right";
        pen.fillStyle = strong ? ink.mark : ink.text;
        pen.font = `${strong ? "bold " : ""}11px system-ui, sans-serif`;
        pen.fillText(short(text), 0, 0, 0.34 * width - 6);
        pen.restore();
      };
      if (named) {
        rows.forEach((row, i) => write(row, left - 6, 1 + (i + 0.5) * tall, false, i === chosen));
        const every = Math.ceil(12 / wide);
        columns.forEach((column, j) => {
          if (j % every === 0 || j === across) write(column, left + (j + 0.5) * wide, rows.length * tall + 7, true, j === across);
        });
      } else {
        let below = -Infinity;
        rows.forEach((row, i) => {
          const { layer } = known.get(row), y = 1 + (i + 0.5) * tall;
          if (i && known.get(rows[i - 1]).layer === layer) return;
          if (y - below < 12) return;
          below = y;
          write(called(layer), left - 6, y + 3, false, layer === known.get(state.block)?.layer);
        });
      }
      if (chosen >= 0 && across >= 0) {
        const frame = (color, line, out) => {
          pen.strokeStyle = color;
          pen.lineWidth = line;
          pen.strokeRect(left + across * wide - out, 1 + chosen * tall - out, wide - gap + 2 * out, tall - gap + 2 * out);
        };
        frame(ink.page, 4, 1);
        frame(ink.text, 2, 1);
      }
      this.tell(null);
      Object.assign(this.box.dataset, { block: state.block ?? "", column: this.column ?? "", part: this.map.part });
    }

    under(event) {
      const { rows, columns, left, wide, tall } = this.layout(), box = this.box.getBoundingClientRect();
      const row = rows[Math.floor((event.clientY - box.top - 1) / tall)];
      const column = columns[Math.floor((event.clientX - box.left - left) / wide)];
      return row && column ? [row, column] : null;
    }

    pick(place) {
      if (place) choose({ block: place[0], [{ block: "other" }[this.map.axis] ?? this.map.axis]: place[1] });
    }

    tell(place) {
      this.note.textContent = state.block === null ? "" : this.told(...(place ?? [state.block, this.column]));
    }

    key(event) {
      const rows = visible(), { columns } = this, most = columns.length - 1;
      let i = rows.indexOf(state.block), j = columns.indexOf(this.column);
      const moves = {
        ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1], Home: [0, -j], End: [0, most - j],
      };
      if (!moves[event.key]) return;
      event.preventDefault();
      i = Math.min(Math.max(i + moves[event.key][0], 0), rows.length - 1);
      j = Math.min(Math.max(j + moves[event.key][1], 0), most);
      this.pick([rows[i], columns[j]]);
    }
  }

  const OUTSIDE = "outside of the layers";
  const called = (layer) => (layer === OUTSIDE ? "outside" : layer);
  const short = (name) => (name.length <= 18 ? name : `…${name.slice(-17)}`);
  const probe = html("span", { hidden: "" });
  function colours() {
    return Object.fromEntries(["text", "page", "mark", "soft", "zero"].map((name) => {
      probe.style.color = `var(--${name})`;
      return [name, getComputedStyle(probe).color];
    }));
  }

  /** The colours of all maps of the chosen quantity: of every run and part. */
  const heats = {};
  const heat = () => (heats[state.title] ??= heatOf(state.title));
  function heatOf(title) {
    const chosen = runs.flatMap((run) => run.maps.filter((map) => map.title === title).map((map) => [run, map]));
    const logarithmic = chosen.some(([, map]) => map.logarithmic);
    let low = Infinity, high = -Infinity, zeros = false;
    for (const [run, { values }] of chosen) {
      for (const value of values) {
        if (value === null) continue;
        if (logarithmic && value <= run.zero) { zeros = true; continue; }
        low = Math.min(low, value);
        high = Math.max(high, value);
      }
    }
    const of = logarithmic ? Math.log : (value) => value;
    const color = (value, run) =>
      logarithmic && value <= run.zero ? null : viridis(high > low ? (of(value) - of(low)) / (of(high) - of(low)) : 1);
    return { low, high, zeros, color };
  }

  const maps = titles.length ? runs.map((run, place) => new HeatMap(run, place)) : [];

  // ---- charts

  /** Series of points with bars; a click chooses the nearest point that has a block. */
  function chart(width, { x, y, series, turned = false, height = 260, label }) {
    const left = 54, right = 10, top = 10, bottom = turned ? 96 : 34;
    const at = (point) => [left + x.at(point.x) * (width - left - right), height - bottom - y.at(point.y) * (height - top - bottom)];
    const clip = (value) => height - bottom - Math.min(Math.max(y.at(value), 0), 1) * (height - top - bottom);
    const picture = svg("svg", { class: "chart", width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
    for (const [share, text] of y.ticks) {
      const place = height - bottom - share * (height - top - bottom);
      picture.append(
        svg("path", { class: "grid", d: `M ${left} ${place} H ${width - right}` }),
        svg("text", { x: left - 6, y: place + 4, "text-anchor": "end" }, text),
      );
    }
    for (const [share, text, strong] of x.ticks) {
      const place = left + share * (width - left - right), low = height - bottom;
      const turn = turned ? { transform: `translate(${place + 4} ${low + 8}) rotate(-90)` } : { x: place, y: low + 18 };
      picture.append(svg("text", { ...turn, "text-anchor": turned ? "end" : "middle", class: strong ? "strong" : null }, text));
    }
    if (label) picture.append(svg("text", { x: (left + width - right) / 2, y: height - 2, "text-anchor": "middle" }, label));
    const points = [];
    for (const { points: found, colour, mark, line, faint, band } of series) {
      const group = svg("g", { style: `color: var(--${colour})`, class: faint ? "faint" : null });
      if (band) {
        const edge = (key) => found.map((point) => `${at(point)[0]} ${clip(point[key])}`);
        group.append(svg("path", { class: "band", d: `M ${edge("low").join(" L ")} L ${edge("high").reverse().join(" L ")} Z` }));
      }
      if (line) group.append(svg("path", { class: "line", d: `M ${found.map((point) => at(point).join(" ")).join(" L ")}` }));
      for (const point of band ? [] : found) {
        const [px, py] = at(point);
        if (point.high > point.low) group.append(svg("path", { class: "bar", d: `M ${px} ${clip(point.low)} V ${clip(point.high)}` }));
        group.append(svg("path", { class: point.chosen ? "point chosen" : "point", d: shape(mark, px, py, point.chosen ? 6 : 3.5) },
          svg("title", {}, point.title)));
        points.push([px, py, point]);
      }
      picture.append(group);
    }
    picture.addEventListener("click", (event) => {
      const box = picture.getBoundingClientRect();
      const away = ([px, py]) => Math.hypot(event.clientX - box.left - px, event.clientY - box.top - py);
      const nearest = points.filter(([, , point]) => point.pick).sort((a, b) => away(a) - away(b))[0];
      if (nearest && away(nearest) < 24) nearest[2].pick();
    });
    return picture;
  }
  function shape(mark, x, y, r) {
    if (mark === "square") return `M ${x - r} ${y - r} h ${2 * r} v ${2 * r} h ${-2 * r} Z`;
    if (mark === "triangle") return `M ${x} ${y - 1.2 * r} l ${1.2 * r} ${2.1 * r} h ${-2.4 * r} Z`;
    if (mark === "diamond") return `M ${x} ${y - 1.3 * r} l ${1.3 * r} ${1.3 * r} l ${-1.3 * r} ${1.3 * r} l ${-1.3 * r} ${-1.3 * r} Z`;
    return `M ${x - r} ${y} a ${r} ${r} 0 1 0 ${2 * r} 0 a ${r} ${r} 0 1 0 ${-2 * r} 0`;
  }

  // ---- the profile through the layers, or over the blocks of one layer

  const profile = html("div", { class: "profile", tabindex: 0, role: "application" });
  const legend = html("div", { class: "series" });
  profile.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step || state.block === null) return;
    event.preventDefault();
    const same = event.key === "ArrowRight" || event.key === "ArrowLeft" ? "role" : "layer";
    const chosen = known.get(state.block), line = visible().filter((name) => known.get(name)[same] === chosen[same]);
    const row = line.length > 1 ? line : visible();
    const next = row[row.indexOf(state.block) + step];
    if (next) choose({ block: next, other: next });
  });

  function drawProfile() {
    const shown = visible(), layers = distinct(shown.map((name) => known.get(name).layer));
    const deep = layers.filter((layer) => layer !== OUTSIDE).length > 1;
    const places = deep ? layers : shown, of = (name) => places.indexOf(deep ? known.get(name).layer : name);
    const role = known.get(state.block)?.role, all = [];
    runs.forEach((run, place) => {
      const rows = run.rows.filter((row) => shown.includes(row.block) && row.numbers[state.quantity]
        && (row.part === state.part || !run.rows.some((one) => one.block === row.block && one.part === state.part)));
      const groups = deep ? distinct(rows.map((row) => known.get(row.block).role)) : [""];
      groups.forEach((group, order) => {
        if (deep && runs.length > 1 && group !== role) return;
        const look = runs.length > 1 ? place : order;
        const found = rows.filter((row) => !deep || known.get(row.block).role === group).map((row) => {
          const [value, error] = row.numbers[state.quantity];
          return {
            x: of(row.block), y: value, low: value - 2 * error, high: value + 2 * error, zero: Math.abs(value) <= run.zero,
            chosen: row.block === state.block, title: `${row.block}: ${written(value, error, run)}`,
            pick: () => choose({ block: row.block, other: row.block }),
          };
        });
        const name = [run.label, group].filter(Boolean).join(" ");
        const faint = deep && runs.length === 1 && group !== role;
        all.push({ name, group, points: found, line: deep, faint, colour: SERIES[look % 7], mark: MARKS[look % 4] });
      });
    });
    const values = all.flatMap(({ points }) => points.filter((point) => !point.zero).map((point) => point.y));
    const logarithmic = values.length > 0 && Math.min(...values) > 0 && Math.max(...values) > 10 * Math.min(...values);
    // What is zero to rounding has no place on a logarithmic axis.
    if (logarithmic) for (const one of all) one.points = one.points.filter((point) => !point.zero);
    const wide = (profile.clientWidth - 64) / Math.max(places.length, 1), every = Math.ceil((deep ? 34 : 13) / wide);
    const ticks = places.map((name, i) => [(i + 0.5) / places.length, short(called(name)),
      name === state.block || name === known.get(state.block)?.layer]);
    const x = { at: (i) => (i + 0.5) / places.length, ticks: ticks.filter(([, , strong], i) => i % every === 0 || (!deep && strong)) };
    profile.replaceChildren(...(values.length ? [chart(profile.clientWidth, {
      x, y: scaleOf(values, logarithmic), series: all.filter((one) => one.points.length), turned: !deep,
    })] : [html("p", { class: "note" }, "Nothing to draw: all numbers are missing or zero to rounding.")]));
    profile.setAttribute("aria-label", `${state.quantity} ${deep ? "through the layers" : "of the blocks"}: left and right arrows `
      + "choose the same role in other layers, up and down other blocks of the layer");
    profile.dataset.block = state.block ?? "";
    const chips = all.filter((one) => one.points.length && (deep || runs.length > 1)).map((one) => {
      const key = svg("svg", { width: 14, height: 14, style: `color: var(--${one.colour})`, "aria-hidden": "true" },
        svg("path", { class: "point", d: shape(one.mark, 7, 7, 4) }));
      const nearby = shown.filter((name) => known.get(name).role === one.group);
      const target = nearby.find((name) => known.get(name).layer === known.get(state.block)?.layer) ?? nearby[0];
      if (runs.length > 1) return html("span", { class: "chip" }, key, one.name);
      return html("button", { type: "button", class: "chip", "aria-pressed": String(one.group === role),
        click: () => choose({ block: target, other: target }) }, key, one.name);
    });
    const focused = document.activeElement?.classList.contains("chip") ? document.activeElement.textContent : null;
    legend.replaceChildren(...chips);
    chips.find((chip) => chip.textContent === focused)?.focus();
  }

  // ---- the panel of what is chosen

  const panel = html("div", { class: "facts" });

  function drawPanel() {
    panel.dataset.block = state.block ?? "";
    if (state.block === null) { panel.replaceChildren(html("p", {}, "No block passes the filters.")); return; }
    const pair = maps.some((one) => one.map?.axis === "block") && state.other !== state.block;
    panel.dataset.other = pair ? state.other : state.block;
    const { layer, role } = known.get(state.block);
    const methods = distinct(runs.flatMap((run) => run.rows.filter((row) => row.block === state.block).map((row) => row.method)));
    const place = (layer === OUTSIDE ? "Outside of the layers" : `${role} of layer ${layer}`)
      + (methods.some(Boolean) ? `, by: ${methods.filter(Boolean).join(", ")}` : "");
    panel.replaceChildren(
      html("h3", {}, pair ? `${state.block} × ${state.other}` : state.block),
      html("p", { class: "note" }, pair ? `A pair: the block of the Hessian between ${state.block} and ${state.other}` : place),
      ...numbers(pair),
      ...(pair ? [] : curves()),
      ...tables.filter((table) => table !== bench || runs.length > 1).map(rowsOf).filter(Boolean),
    );
  }

  /** A table for each run, all marks on one scale. */
  function numbers(pair) {
    const found = runs.map((run, order) => (pair ? pairNumbers(run, maps[order]) : blockNumbers(run)));
    const first = runs.flatMap((run, i) => found[i].rows.map(([, all]) => all[0]).filter(Boolean).map((one) => [run, one]));
    const logarithmic = first.length > 0 && first.every(([run, [value]]) => value > run.zero);
    const ends = first.flatMap(([, [value, error]]) => [value, value + 2 * error, value - 2 * error]);
    const scale = scaleOf(logarithmic ? ends.filter((end) => end > 0) : ends, logarithmic);
    const at = (end) => 5 + 84 * Math.min(Math.max(logarithmic && end <= 0 ? 0 : scale.at(end), 0), 1);
    const label = found.find(({ labels }) => labels.length)?.labels[0];
    return [
      ...runs.map((run, i) => (found[i].rows.length ? numbersTable(run, found[i], at) : absent(run))),
      html("p", { class: "note marks" }, `Marks: ${label}, with bars of two standard errors`),
    ];
  }

  function blockNumbers(run) {
    const rows = run.rows.filter((row) => row.block === state.block);
    const labels = distinct(rows.flatMap((row) => Object.keys(row.numbers)));
    return { labels, rows: rows.map((row) => [row.part, labels.map((label) => row.numbers[label])]) };
  }

  function pairNumbers(run, map) {
    const there = map.places.has(state.block) && map.places.has(state.other);
    const chosen = there ? run.maps.filter((one) => one.title === state.title) : [];
    return { labels: [state.title], rows: chosen.map((one) => [one.part, [map.cell(state.block, state.other, one)]]) };
  }

  const wide = (label, table) => html("div", { class: "wide", role: "region", tabindex: 0, "aria-label": label }, table);
  const absent = (run) => html("p", { class: "absent" }, run.label ? `${run.label}: ` : "", "not in this run");

  /** One row per part; the first number also as a mark with its bar. */
  function numbersTable(run, { labels, rows }, at) {
    const bar = ([value, error]) => svg("svg", { class: "whisker", width: 94, height: 16, "aria-hidden": "true" },
      svg("path", { class: "grid", d: "M 5 8 H 89" }),
      svg("path", { class: "bar", d: `M ${at(value - 2 * error)} 8 H ${at(value + 2 * error)}` }),
      svg("path", { class: "point", d: shape("circle", at(value), 8, 3.5) }));
    const named = rows.some(([part]) => part);
    const head = (text, number) => html("th", { scope: "col", class: number ? "number" : null }, text);
    const heads = [named ? head(kind) : null, ...labels.map((label) => head(label, true))];
    const line = ([part, numbers]) => {
      const found = numbers.map((one) => html("td", { class: "number" }, one ? number(one, run) : ""));
      found.splice(1, 0, html("td", { class: "bars" }, numbers[0] ? bar(numbers[0]) : ""));
      return html("tr", { "aria-current": part === state.part && rows.length > 1 ? "true" : null },
        named ? html("th", { scope: "row" }, part) : null, ...found);
    };
    heads.splice(2, 0, html("td", { class: "bars", title: "± 2 standard errors" }));
    const table = html("table", {}, html("thead", {}, html("tr", {}, ...heads)), html("tbody", {}, ...rows.map(line)));
    table.dataset.run = run.label;
    return html("div", {}, run.label ? html("h4", {}, run.label) : null, wide(`Numbers ${run.label}`, table));
  }

  /** Spectra, and norms during training: one chart for each kind, with a curve for each run and part. */
  function curves() {
    const found = runs.flatMap((run) => run.curves.filter((curve) => curve.block === state.block).map((curve) => [run, curve]));
    return distinct(found.map(([, curve]) => curve.title)).map((title) => {
      const chosen = found.filter(([, curve]) => curve.title === title), { axis } = chosen[0][1];
      const all = chosen.flatMap(([, { x }]) => x), least = 1e-6 * Math.max(...all.map(Math.abs)) || 1;
      const most = Math.max(...all), bend = (value) => Math.sign(value) * Math.max(0, Math.log10(Math.abs(value) / least));
      const ends = [Math.min(...all.map(bend)), Math.max(...all.map(bend))];
      const within = (value) => (bend(value) - ends[0]) / (ends[1] - ends[0] || 1);
      const marks = [-1, -1e-3, 0, 1e-3, 1].map((share) => share * least * 1e6);
      const x = axis === "λ"
        ? { at: within, ticks: marks.filter((value) => within(value) >= -0.001 && within(value) <= 1.001)
          .map((value) => [within(value), value ? value.toExponential(0) : "0"]) }
        : scaleOf([Math.min(...all), most], false);
      const series = chosen.map(([run, curve], order) => ({
        name: [run.label, axis === "λ" ? "" : curve.part].filter(Boolean).join(", "), line: true, band: axis === "λ",
        colour: SERIES[order % 7], mark: MARKS[order % 4],
        // What is zero to rounding has no place on a logarithmic axis.
        points: curve.x.map((at, i) => ({ x: at, y: curve.y[i], low: curve.low[i], high: curve.high[i], title: `${at}: ${curve.y[i]}` }))
          .filter((point) => axis === "λ" || point.y > run.zero),
      })).filter(({ points }) => points.length);
      const values = series.flatMap(({ points }) => points.flatMap((point) => [point.y, point.low, point.high]));
      const y = axis === "λ" ? scaleOf([0, 1], false) : scaleOf(values.filter((value) => value > 0), true);
      const keys = series.filter(({ name }) => name).map(({ name, colour }) =>
        html("span", { class: "chip" }, svg("svg", { width: 18, height: 10, style: `color: var(--${colour})`, "aria-hidden": "true" },
          svg("path", { class: "line", d: "M 0 5 H 18" })), name));
      const picture = chart(Math.max(280, Math.min(560, panel.clientWidth - 4)), { x, y, series, height: 200, label: axis === "λ" ? "" : axis });
      picture.removeAttribute("aria-hidden");
      picture.setAttribute("role", "img");
      picture.setAttribute("aria-label", `${title}, ${state.block}`);
      return html("div", {}, html("h4", {}, title), ...(series.length ? [picture, html("div", { class: "series" }, ...keys)]
        : [html("p", { class: "note" }, "Nothing to draw: all numbers are zero to rounding.")]));
    });
  }

  /** What another table of the page says of the choice. */
  function rowsOf(table) {
    const found = table.about();
    if (!found.length) return null;
    const keep = table.columns.map((name, place) => [name, place]).filter(([name]) => !["block", "with", "layer"].includes(name));
    const look = (place) => ({ class: place >= table.words ? "number" : null });
    const copy = (cell, place) => {
      const found = html("td", look(place), ...[...cell.childNodes].map((node) => node.cloneNode(true)));
      for (const one of found.querySelectorAll("data")) one.replaceChildren(...words(one.textContent));
      return found;
    };
    const label = runs.find((run) => run.label && table.caption.startsWith(`${run.label}: `))?.label;
    const subject = (label ? table.caption.slice(label.length + 2) : table.caption).split(":")[0];
    const title = label ? `${label}: ${subject}` : subject;
    if (found.length === 1 && keep.length > 5) { // a long row fits as a column
      const line = ([name, place]) => html("tr", {}, html("th", { scope: "row" }, name), copy(found[0].row.cells[place], place));
      return html("div", {}, html("h4", {}, title), wide(title, html("table", {}, html("tbody", {}, ...keep.map(line)))));
    }
    return html("div", {}, html("h4", {}, title), wide(title, html("table", {},
      html("thead", {}, html("tr", {}, ...keep.map(([name, place]) => html("th", { scope: "col", ...look(place) }, name)))),
      html("tbody", {}, ...found.map(({ row }) =>
        html("tr", {}, ...keep.map(([, place]) => copy(row.cells[place], place))))))));
  }

  // ---- the page

  const controls = [];

  function build() {
    bench.changed = settle;
    const size = (row) => (row.part === state.part || !row.part ? Math.abs(Object.values(row.numbers)[0]?.[0] ?? 0) : -1);
    const largest = runs[0].rows.reduce((best, row) => (size(row) > size(best) ? row : best));
    Object.assign(state, { block: largest.block, other: largest.block });
    const [mapPane, panelPane, profilePane] = ["maps", "panel", "profile"].map(byId);
    const control = (name, label, options) => {
      const [field, select] = chooser(label, options.map((one) => [one, one]), state[name], (value) => choose({ [name]: value }));
      controls.push(() => { select.value = state[name]; });
      return options.length > 1 ? field : html("span", { class: "field" }, options.length ? `${label}: ${options[0]}` : "");
    };
    if (maps.length) {
      mapPane.append(html("div", { class: "tools" }, control("part", kind, parts), control("title", "map", titles)),
        html("div", { class: "side" }, ...maps.map((map) => map.element)), ramp);
      mapPane.hidden = false;
    }
    panelPane.append(panel);
    profilePane.append(html("div", { class: "tools" }, maps.length ? "" : control("part", kind, parts),
      control("quantity", "number", quantities)), profile, legend);
    panelPane.hidden = profilePane.hidden = false;
    document.body.append(probe);
    let width = 0;
    new ResizeObserver(() => {
      if (width !== document.body.clientWidth) { width = document.body.clientWidth; redraw(); }
    }).observe(document.body);
  }

  const ramp = html("div", { class: "ramp" });
  function drawRamp() {
    const { low, high, zeros } = heat();
    ramp.replaceChildren(state.title, " ", exponential(low), " ", html("i", { class: "colours" }), " ", exponential(high),
      ...(zeros ? [html("span", {}, html("i", { class: "zero" }), " zero, or too small to resolve")] : []));
  }

  function redraw() {
    if (!bench || !controls.length) return;
    for (const map of maps) map.draw();
    drawProfile();
    drawPanel();
  }

  function update() {
    for (const sync of controls) sync();
    for (const table of tables) table.mark();
    if (maps.length) drawRamp();
    redraw();
  }

  document.querySelector("header").append(scheme);
  dark.addEventListener("change", () => paint());
  paint();
  if (bench && runs.length) {
    build();
    update();
  }
})();
