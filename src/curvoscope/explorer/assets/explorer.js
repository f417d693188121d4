/* The page's memory of its state. At most one state is asked for: what is moved meanwhile changes `wanted`, and the
   last of it is asked for when the answer is there. So a storm of moves makes no queue. Answers are fetched and drawn
   here: through Dash, every move would take tens of milliseconds more. */
(function () {
  "use strict";
  const page = { kinds: {}, tour: [], defaults: {}, wanted: null, sent: "", busy: false, step: -1, figures: {} };
  const parts = ["matrices", "curves", "spectra"];
  const patience = 30000; // milliseconds
  const silence = "The server did not answer. Is it still running? Move a control to try again.";
  const shown = "show the last state that could be computed.";
  const set = (id, props) => window.dash_clientside.set_props(id, props);
  const none = () => window.dash_clientside.no_update;
  const query = (state) => new URLSearchParams(state).toString();

  /* A log slider stands at log10 of its field. */
  const place = (name, value) => (page.kinds[name] === "log" ? Math.log10(value) : value);
  const field = (name, at) =>
    page.kinds[name] === "log" ? Number(Math.pow(10, Number(at)).toPrecision(4)) : Number(at);

  function show() {
    for (const [name, value] of Object.entries(page.wanted)) {
      const text = document.getElementById(name + "-value");
      if (!text) continue;
      text.textContent = String(value);
      document.getElementById(name).setAttribute("aria-valuetext", String(value));
    }
  }

  function ask() {
    const now = query(page.wanted);
    if (page.busy || now === page.sent) return;
    page.busy = true;
    page.sent = now;
    document.getElementById("main").setAttribute("aria-busy", "true");
    answer(parts.map(get)).then(finish, (error) => {
      window.console.error(error);
      fail("The answer could not be drawn. Load the page again.");
    });
  }

  /* An answer, or an error: `told` by the server of this state, or of anything that went wrong on the way. */
  async function get(part) {
    try {
      const options = { cache: "no-store", signal: AbortSignal.timeout(patience) };
      const found = await window.fetch("answer/" + part + "?" + page.sent, options);
      return Object.assign({ told: found.ok }, await found.json());
    } catch {
      return { error: silence };
    }
  }

  /* Draw a part while others are still computed: the matrices first, then the curves and the spectra as they come.
     All are waited for, also when one is refused. */
  async function answer([matrices, ...others]) {
    const first = await matrices, drawn = first.error ? null : write(first);
    const rest = others.map(async (request) => {
      const found = await request;
      if (!first.error && !found.error) await write(found);
      return found;
    });
    const [, ...found] = await Promise.all([drawn, ...rest]);
    return [first, ...found];
  }

  function finish(found) {
    const refused = found.find((one) => one.error);
    if (refused && !refused.told) return fail(refused.error);
    if (!refused) say();
    else say(refused.error, (found[0].error ? "The figures " : "Some of the figures ") + shown);
    if (!found[0].error) link(page.sent);
    document.getElementById("main").dataset.answered = page.sent;
    rest(page.sent);
    ask();
  }

  function fail(message) {
    say(message);
    rest(page.sent);
    page.sent = "";
  }

  /* The link follows once a state is answered: browsers take milliseconds for it, and limit how often. */
  function rest(asked) {
    page.busy = false;
    window.history.replaceState(null, "", window.location.pathname + "?" + asked + window.location.hash);
    document.getElementById("main").setAttribute("aria-busy", "false");
  }

  function say(...lines) {
    const paragraphs = lines.map((line) => {
      const paragraph = document.createElement("p");
      paragraph.textContent = line;
      return paragraph;
    });
    document.getElementById("message").replaceChildren(...paragraphs);
  }

  async function write(found) {
    const drawn = Object.entries(found.figures).map(([name, values]) => draw(name, values));
    for (const [name, [text, digits]] of Object.entries(found.numbers)) {
      number(document.querySelector('[data-number="' + name + '"]'), text, digits);
    }
    for (const [id, pieces] of Object.entries(found.lines)) {
      const nodes = pieces.map((piece) => {
        if (typeof piece === "string") return piece;
        const [[name, [text, digits]]] = Object.entries(piece);
        const span = document.createElement("span");
        span.dataset.number = name;
        return number(span, text, digits);
      });
      document.getElementById(id).replaceChildren(...nodes);
    }
    await Promise.all(drawn);
  }

  function number(span, text, digits) {
    span.textContent = text;
    span.title = digits;
    return span;
  }

  /* Values go to their places in a figure; those that are there already are not drawn again. Plotly takes 12 to 27 ms
     for a whole figure, 6 to 8 ms for points alone and 4 ms for a picture alone, which is therefore set here. */
  async function draw(name, values) {
    const figure = page.figures[name] || (page.figures[name] = await blank(name));
    const changed = Object.entries(values).filter(([path, value]) => {
      const text = JSON.stringify(value);
      if (figure.written[path] === text) return false;
      figure.written[path] = text;
      const steps = path.split("."), last = steps.pop();
      steps.reduce((place, step) => place[step], figure)[last] = value;
      return true;
    });
    const points = changed.filter(([path]) => moving.test(path)), image = changed.find(([path]) => path === picture);
    if (points.length + (image ? 1 : 0) < changed.length) {
      const data = figure.data.map((trace) => Object.assign({}, trace));
      await window.Plotly.react(figure.plot, data, structuredClone(figure.layout), figure.plot._context);
    } else if (points.length) await window.Plotly.animate(figure.plot, frame(points), instantly);
    if (!image) return;
    figure.plot.layout.images[0].source = image[1]; // the figure that is saved is made from the layout
    figure.plot.querySelector(".imagelayer image").setAttribute("href", image[1]);
  }

  const picture = "layout.images.0.source";

  /* Points of lines and markers, which a frame of an animation draws without axes and legend: half the time. */
  const moving = /^data\.\d+\.(x|y|customdata)$/;
  const instantly = { frame: { duration: 0, redraw: false }, transition: { duration: 0 }, mode: "immediate" };

  function frame(lines) {
    const traces = new Map();
    for (const [path, value] of lines) {
      const [, number, field] = path.split(".");
      traces.set(Number(number), Object.assign(traces.get(Number(number)) || {}, { [field]: value }));
    }
    return { data: [...traces.values()], traces: [...traces.keys()] };
  }

  /* A figure as the server made the page with it, once Dash has drawn it. */
  async function blank(name) {
    for (;;) {
      const plot = document.querySelector("#graph-" + name + " .js-plotly-plot");
      if (plot && plot._fullLayout) {
        return { plot, written: {}, data: structuredClone(plot.data), layout: structuredClone(plot.layout) };
      }
      await new Promise((done) => window.setTimeout(done, 10));
    }
  }

  function apply(state) {
    page.wanted = Object.assign({}, state);
    for (const [name, kind] of Object.entries(page.kinds)) {
      if (kind === "choice") document.getElementById(name).value = state[name];
      else set(name, { value: place(name, state[name]) });
    }
    show();
    ask();
  }

  function mark(figure) {
    for (const card of document.querySelectorAll(".card")) {
      card.classList.toggle("looked-at", card.id === "figure-" + figure);
    }
  }

  function link(found) {
    for (const anchor of document.querySelectorAll("a[data-csv]")) {
      anchor.setAttribute("href", "csv/" + anchor.dataset.csv + "?" + found);
      anchor.setAttribute("download", "curvoscope-" + anchor.dataset.csv + ".csv");
    }
  }

  function moved(name, value) {
    page.wanted[name] = value;
    show();
    ask();
  }

  /* Dash does not follow a select: its choices are kept here. */
  document.addEventListener("change", (event) => {
    const name = event.target.id;
    if (page.wanted && page.kinds[name] === "choice") moved(name, event.target.value);
  });

  /* Before Dash does, as it takes its time. */
  document.addEventListener(
    "input",
    (event) => {
      const { id, value } = event.target;
      if (page.wanted && id in page.kinds && page.kinds[id] !== "choice" && value) moved(id, field(id, value));
    },
    true
  );

  document.addEventListener("click", (event) => {
    if (event.target.id === "reset" && page.wanted) apply(page.defaults);
    const button = event.target.closest("button[data-png]");
    if (!button) return;
    const drawn = document.querySelector("#graph-" + button.dataset.png + " .js-plotly-plot");
    window.Plotly.downloadImage(drawn, { format: "png", scale: 2, filename: "curvoscope-" + button.dataset.png });
  });

  window.dash_clientside = Object.assign({}, window.dash_clientside, {
    explorer: {
      /* The server has read the link: start from there. */
      restored(state, memory) {
        if (!state) return none();
        page.kinds = memory.kinds;
        page.tour = memory.tour;
        page.defaults = memory.defaults;
        apply(state);
        return none();
      },

      tour(next, back) {
        const which = window.dash_clientside.callback_context.triggered_id;
        if (!page.wanted || !which || !(next || back)) return [none(), none(), none(), none()];
        page.step = (page.step + (which === "tour-next" ? 1 : page.tour.length - 1)) % page.tour.length;
        const step = page.tour[page.step];
        apply(step.state);
        mark(step.figure);
        const title = "Step " + (page.step + 1) + " of " + page.tour.length + ": " + step.title;
        const last = page.step === page.tour.length - 1;
        return [title, step.text, last ? "Start again" : "Next step", page.step === 0];
      },
    },
  });
})();
