/* The page's memory of its state. At most one request is under way: what is moved meanwhile changes `wanted`, and the
   last of it is asked for when the answer is there. So a storm of moves makes no queue. */
(function () {
  "use strict";
  const page = { kinds: {}, tour: [], defaults: {}, wanted: null, places: {}, asked: 0, sent: "", busy: false, step: -1 };
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
    const hash = window.location.hash;
    window.history.replaceState(null, "", window.location.pathname + "?" + query(page.wanted) + hash);
  }

  function ask() {
    const now = query(page.wanted);
    if (page.busy || now === page.sent) return;
    page.busy = true;
    page.sent = now;
    page.asked += 1;
    document.getElementById("main").setAttribute("aria-busy", "true");
    set("request", { data: { number: page.asked, state: page.wanted } });
    window.setTimeout(watch, 2000, page.asked, 1);
  }

  /* Dash says nothing when a request does not reach the server: look whether it is there, while no answer comes. */
  function watch(number, times) {
    if (!page.busy || number !== page.asked) return;
    const again = () => (times < 15 ? window.setTimeout(watch, 2000, number, times + 1) : fail(number));
    window.fetch(window.location.pathname, { method: "HEAD" }).then(again, () => fail(number));
  }

  function finish(accepted) {
    const main = document.getElementById("main");
    page.busy = false;
    if (accepted) link(page.sent);
    main.dataset.answered = page.sent;
    main.setAttribute("aria-busy", "false");
    ask();
  }

  function fail(number) {
    if (!page.busy || number !== page.asked) return;
    set("message", { children: "The server gave no answer. Is it still running? Move a control to try again." });
    page.busy = false;
    page.sent = "";
    document.getElementById("main").setAttribute("aria-busy", "false");
  }

  function apply(state) {
    page.wanted = Object.assign({}, state);
    for (const [name, kind] of Object.entries(page.kinds)) {
      page.places[name] = place(name, state[name]);
      if (kind === "choice") document.getElementById(name).value = state[name];
      else set(name, { value: page.places[name] });
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

  /* Dash does not follow a select: its choices are kept here. */
  document.addEventListener("change", (event) => {
    const name = event.target.id;
    if (!page.wanted || page.kinds[name] !== "choice") return;
    page.wanted[name] = event.target.value;
    show();
    ask();
  });

  document.addEventListener("click", (event) => {
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

      /* A slider or the seed was moved. Those that stand where we put them keep their exact value. */
      moved(...values) {
        if (!page.wanted) return none();
        const sliders = Object.keys(page.kinds).filter((name) => page.kinds[name] !== "choice");
        sliders.forEach((name, i) => {
          const at = values[i];
          if (at === null || at === undefined || at === "" || String(at) === String(page.places[name])) return;
          page.places[name] = at;
          page.wanted[name] = field(name, at);
        });
        show();
        ask();
        return none();
      },

      /* A part of the request has come to its end, with an answer or without one. */
      settled(first, second, matrices, spectra) {
        if (first || second || !page.busy) return none();
        const whole = [matrices, spectra].every((answer) => answer && answer.number === page.asked);
        if (whole) finish(matrices.accepted);
        else window.setTimeout(fail, 500, page.asked); // unless the answer is only late to be seen
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
        return [title, step.text, last ? "Again from the start" : "Next step", page.step === 0];
      },

      reset(clicks) {
        if (!clicks || !page.wanted) return none();
        apply(page.defaults);
        return none();
      },
    },
  });
})();
