"use strict";
// Charts of a run by uPlot: hover or arrow keys for values, drag to zoom, a switch for each curve, smoothing.
const Charts = (() => {
  const LIGHT = ["#0b57c2", "#b3470a", "#176b31", "#7a3fc7", "#b0267d", "#6b5900", "#067a8f", "#57606a"];
  const DARK = ["#79b4ff", "#f2a65a", "#6fd08c", "#c39bff", "#ff93cf", "#d8be4a", "#4fd0e3", "#b3bcc7"];
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const shown = new Map();  // charts on the page, by name
  let smoothing = 0;

  const element = (tag, properties = {}, ...children) => {
    const made = Object.assign(document.createElement(tag), properties);
    made.append(...children);
    return made;
  };
  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const colour = (curve) => (dark.matches ? DARK : LIGHT)[curve.colour % LIGHT.length];

  function number(value) {
    if (value === null || value === undefined) return "–";
    const size = Math.abs(value);
    if (size !== 0 && (size >= 1e6 || size < 1e-3)) return value.toExponential(2).replace(/\.?0+e/, "e").replace("e+", "e");
    return size >= 1000 ? Math.round(value).toLocaleString("en-US") : String(Number(value.toPrecision(4)));
  }

  // an exponential mean whose first values are not drawn towards zero
  function smooth(values) {
    let sum = 0, weight = 0;
    return values.map((value) => {
      if (value === null || value === undefined) return value;
      sum = smoothing * sum + (1 - smoothing) * value;
      weight = smoothing * weight + (1 - smoothing);
      return sum / weight;
    });
  }

  class Picture {
    constructor(data) {
      this.hidden = new Set();
      this.log = data.log;
      this.title = element("h3");
      this.at = element("span", {className: "at muted"});
      this.whole = element("button", {type: "button", textContent: "whole", hidden: true});
      this.scale = element("button", {type: "button", textContent: "log"});
      this.plot = element("div", {className: "plot", tabIndex: 0});
      this.legend = element("ul", {className: "legend"});
      this.figure = element("figure", {className: "card", id: data.name},
        element("figcaption", {}, this.title, this.at, this.whole, this.scale), this.legend, this.plot);
      this.plot.setAttribute("role", "img");
      this.scale.setAttribute("aria-label", `log axis: ${data.title}`);
      this.whole.setAttribute("aria-label", `whole chart: ${data.title}`);
      this.scale.addEventListener("click", () => { this.log = !this.log; this.draw(); });
      this.whole.addEventListener("click", () => this.draw());
      this.plot.addEventListener("keydown", (event) => this.move(event));
      new ResizeObserver(() => this.resize()).observe(this.plot);
      this.update(data);
    }

    update(data) {
      const same = this.data && JSON.stringify(data.curves.map((c) => c.label)) ===
        JSON.stringify(this.data.curves.map((c) => c.label));
      this.data = data;
      this.title.textContent = data.title + (data.unit ? `, ${data.unit}` : "");
      if (!same || !this.chart) { this.draw(); return; }
      const zoomed = !this.whole.hidden;
      this.chart.setData(this.table(), !zoomed);
      if (zoomed) this.chart.redraw();
      this.say(null);
    }

    // steps, then each curve, then each curve smoothed
    table() {
      const curves = this.data.curves;
      this.joined = uPlot.join(curves.map((curve) => [curve.steps, curve.values]));
      const [steps, ...values] = this.joined;
      return [steps, ...values, ...values.map((each, i) => this.smoothed(curves[i]) ? smooth(each) : each)];
    }

    smoothed(curve) { return smoothing > 0 && !curve.dashed && curve.steps.length > 2; }

    draw() {
      this.chart?.destroy();
      this.whole.hidden = true;
      const curves = this.data.curves;
      const positive = curves.every((curve) => curve.values.every((value) => value > 0));
      const log = this.log && positive;
      this.scale.hidden = !positive;
      this.scale.setAttribute("aria-pressed", String(log));
      const line = (curve, i, alpha, show) => ({
        stroke: colour(curve), width: 1.6, alpha, dash: curve.dashed ? [6, 4] : undefined, spanGaps: true,
        show: show && !this.hidden.has(curve.label),
        points: {show: curve.steps.length < 30, size: 5, fill: colour(curve)},
      });
      const axis = {stroke: style("--muted"), grid: {stroke: style("--grid"), width: 1},
        ticks: {stroke: style("--grid"), width: 1}, font: "12px system-ui, sans-serif",
        values: (chart, splits) => splits.map((value) => value === null ? "" : number(value))};
      this.chart = new uPlot({
        width: Math.max(120, this.plot.clientWidth), height: 220, legend: {show: false},
        cursor: {sync: {key: "steps"}, drag: {x: true, y: false}, points: {size: 7}},
        scales: {x: {time: false}, y: log ? {distr: 3} : {}},
        axes: [{...axis, size: 36, incrs: [1, 2, 5].flatMap((n) => [...Array(8).keys()].map((e) => n * 10 ** e)).sort((a, b) => a - b)},
          {...axis, size: 62}],
        series: [{},
          ...curves.map((curve, i) => line(curve, i, this.smoothed(curve) ? 0.3 : 1, true)),
          ...curves.map((curve, i) => ({...line(curve, i, 1, this.smoothed(curve)), points: {show: false}}))],
        hooks: {
          setCursor: [(chart) => this.say(chart.cursor.idx)],
          setSelect: [(chart) => { if (chart.select.width > 2) this.whole.hidden = false; }],
        },
      }, this.table(), this.plot);
      this.name();
      this.say(null);
    }

    // the switches of the curves, each with its value
    name() {
      this.values = this.data.curves.map(() => element("b"));
      this.legend.replaceChildren(...this.data.curves.map((curve, i) => {
        const button = element("button", {type: "button"}, swatch(curve), `${curve.label} `, this.values[i]);
        button.setAttribute("aria-pressed", String(!this.hidden.has(curve.label)));
        button.addEventListener("click", () => {
          this.hidden[this.hidden.has(curve.label) ? "delete" : "add"](curve.label);
          this.draw();
          this.legend.children[i].firstChild.focus();
        });
        return element("li", {}, button);
      }));
    }

    // values at a place; at the last step without one
    say(index) {
      const [steps, ...values] = this.joined;
      const at = index ?? steps.length - 1;
      this.at.textContent = `step ${number(steps[at])}`;
      values.forEach((each, i) => {
        let near = Math.min(at, each.length - 1);
        while (near > 0 && (each[near] === null || each[near] === undefined)) near -= 1;  // the one before
        this.values[i].textContent = number(each[near]);
      });
      this.plot.setAttribute("aria-label", `${this.data.title} at step ${steps[at]}: ` +
        this.data.curves.map((curve, i) => `${curve.label} ${this.values[i].textContent}`).join(", ") +
        ". Arrow keys move along the steps.");
    }

    move(event) {
      const count = this.joined[0].length, page = Math.max(1, Math.round(count / 10));
      const by = {ArrowLeft: -1, ArrowRight: 1, PageUp: -page, PageDown: page, Home: -count, End: count}[event.key];
      if (by === undefined) return;
      event.preventDefault();
      const index = Math.min(count - 1, Math.max(0, (this.chart.cursor.idx ?? count - 1) + by));
      this.chart.setCursor({left: this.chart.valToPos(this.joined[0][index], "x"), top: 20});
    }

    resize() {
      if (this.chart && this.plot.clientWidth > 0 && this.chart.width !== this.plot.clientWidth)
        this.chart.setSize({width: this.plot.clientWidth, height: 220});
    }
  }

  function swatch(curve) {
    const space = "http://www.w3.org/2000/svg";
    const made = document.createElementNS(space, "svg"), line = document.createElementNS(space, "line");
    for (const [key, value] of Object.entries({x1: 0, x2: 16, y1: 4, y2: 4, stroke: colour(curve), "stroke-width": 3}))
      line.setAttribute(key, value);
    if (curve.dashed) line.setAttribute("stroke-dasharray", "5 3");
    made.setAttribute("aria-hidden", "true");
    made.append(line);
    return made;
  }

  function tools() {
    const slider = element("input", {type: "range", min: 0, max: 0.99, step: 0.01, value: smoothing, id: "smoothing"});
    const output = element("output", {textContent: number(smoothing)});
    slider.addEventListener("input", () => {
      smoothing = Number(slider.value);
      output.textContent = number(smoothing);
      for (const picture of shown.values()) picture.draw();
    });
    return element("div", {className: "tools"}, element("label", {}, "Smoothing ", slider, output),
      element("span", {className: "muted", textContent: "Drag over a chart to zoom, click a curve's name to hide it."}));
  }

  // draw into a place what has changed since the last time
  function draw(place, charts) {
    const names = new Set(charts.map((chart) => chart.name));
    for (const name of [...shown.keys()]) if (!names.has(name)) { shown.get(name).figure.remove(); shown.delete(name); }
    const sections = [...new Set(charts.map((chart) => chart.section))];
    for (const chart of charts) shown.get(chart.name)?.update(chart);
    for (const chart of charts) if (!shown.has(chart.name)) shown.set(chart.name, new Picture(chart));
    if (!charts.length) return;
    let bar = document.getElementById("smoothing")?.closest(".tools");
    place.replaceChildren(bar ?? tools(), ...sections.flatMap((section) => [
      element("h2", {textContent: section}),
      element("div", {className: "charts"}, ...charts.filter((chart) => chart.section === section)
        .map((chart) => shown.get(chart.name).figure))]));
  }

  dark.addEventListener("change", () => { for (const picture of shown.values()) picture.draw(); });
  return {draw, shown};
})();
