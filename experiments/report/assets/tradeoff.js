// The figure of two metrics against each other, with its front.

const view = { x: DATA.x, y: DATA.y, hue: DATA.hues[0] || "", hidden: new Set(), chosen: null, front: [] };

function hueAxis() {
  return DATA.axes.find((axis) => axis.name === view.hue) || null;
}

/** The names of the series: policies in order of appearance, sizes and the like by value. */
function series() {
  const axis = hueAxis();
  if (!axis) return [""];
  const names = axis.texts ? axis.texts.map((text) => text ?? "-") : [axis.same ?? "-"];
  return axis.name === "policy" ? names : names.sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
}

function seriesOf(i) {
  const axis = hueAxis();
  return axis ? valueOf(axis, i) ?? "-" : "";
}

/** Points that are no candidates for a front: oracles, and what breaks a search's limits. */
const APART = new Set(DATA.apart);

function frontChanged() {
  view.front = frontOf(METRICS.get(view.x), METRICS.get(view.y), ALL.filter((i) => isDone(i) && !APART.has(i)));
}

function axisOf(column) {
  const arrow = { lower: "← lower is better", higher: "higher is better →" }[column.better];
  const way = arrow ? `<br>${arrow}` : "";
  return { title: { text: escapeText(axisTitle(column)) + way }, tickformat: column.unit === "share" ? ",.3~%" : undefined };
}

/** Text for Plotly, which reads a little HTML. */
function escapeText(text) {
  return text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
}

function drawTradeoff(place) {
  const [x, y] = [METRICS.get(view.x), METRICS.get(view.y)];
  const known = ALL.filter((i) => isDone(i) && drawn(x, i) !== null && drawn(y, i) !== null);
  const onFront = new Set(view.front);
  const visible = known.filter((i) => !view.hidden.has(seriesOf(i)));
  const edge = view.front.filter((i) => !view.hidden.has(seriesOf(i)));
  const points = sampled(visible, edge);
  const traces = [];
  if (edge.length > 1) {
    traces.push({
      type: "scatter", mode: "lines", hoverinfo: "skip", x: edge.map((i) => drawn(x, i)), y: edge.map((i) => drawn(y, i)),
      line: { color: "#7F7F7F", width: 1.5 },
    });
  }
  series().forEach((name, at) => {
    const own = points.filter((i) => seriesOf(i) === name);
    if (!own.length) return;
    const { color, symbol } = look(at);
    const trace = {
      type: "scatter", mode: "markers", name: escapeText(name), hoverinfo: "none", customdata: own,
      x: own.map((i) => drawn(x, i)), y: own.map((i) => drawn(y, i)),
      marker: {
        color, symbol, size: own.map((i) => (onFront.has(i) ? 12 : 8)), opacity: own.map((i) => (onFront.has(i) || !view.front.length ? 1 : 0.5)),
        line: { width: 0 },
      },
    };
    const error = y.error && METRICS.get(y.error);
    if (error && own.length < 200) {
      trace.error_y = { type: "data", array: own.map((i) => (valueOf(error, i) || 0) / y.scale), thickness: 0.8, width: 0, color };
    }
    traces.push(trace);
  });
  if (view.chosen !== null && drawn(x, view.chosen) !== null && drawn(y, view.chosen) !== null) {
    traces.push({
      type: "scatter", mode: "markers", hoverinfo: "skip", x: [drawn(x, view.chosen)], y: [drawn(y, view.chosen)],
      marker: { symbol: "circle-open", size: 22, color: "#D55E00", line: { width: 3 } },
    });
  }
  const narrow = isNarrow(place);
  const layout = withDefaults({ height: narrow ? 400 : 480, xaxis: axisOf(x), yaxis: axisOf(y), uirevision: `${view.x} ${view.y}` }, narrow);
  Plotly.react(place, traces, layout, CONFIG);
  describe(x, y, known, points);
}

function describe(x, y, known, points) {
  const better = x.better && y.better;
  const parts = [`${y.label[0].toUpperCase()}${y.label.slice(1)} over ${x.label}, ${known.length} points.`];
  if (better) parts.push(`${view.front.length} of them on the front: large marks, joined by a line. Lower is better for ${[x, y].filter((c) => c.better === "lower").map((c) => c.label).join(" and ") || "neither"}.`);
  if (better && APART.size) parts.push(`${APART.size} are left off it: oracles, which know the future, or points beyond a limit of the search.`);
  if (!better) parts.push("One of the two has no better direction, so there is no front.");
  const without = ALL.filter(isDone).length - known.length;
  if (without) parts.push(`${without} points lack one of the two.`);
  if (points.length < known.length && !view.hidden.size) parts.push(`Drawn are ${points.length}: the front and an even draw of the others; the list below has all.`);
  byId("pareto-alt").textContent = parts.join(" ");
}

function drawLegend() {
  const legend = byId("legend");
  legend.replaceChildren();
  if (!view.hue) return;
  series().forEach((name, at) => {
    const { color, symbol } = look(at);
    const button = element("button", null, { type: "button", "aria-pressed": String(!view.hidden.has(name)) });
    button.append(swatch({ marker: { color, symbol } }), element("span", name));
    button.addEventListener("click", () => {
      if (!view.hidden.delete(name)) view.hidden.add(name);
      button.setAttribute("aria-pressed", String(!view.hidden.has(name)));
      drawTradeoff(byId("pareto"));
    });
    legend.append(button);
  });
}

function drawFrontTable() {
  const [x, y] = [METRICS.get(view.x), METRICS.get(view.y)];
  const head = element("tr");
  for (const text of ["point", axisTitle(x), axisTitle(y)]) head.append(element("th", text, { scope: "col" }));
  const rows = view.front.slice(0, 200).map((i) => {
    const row = element("tr");
    row.append(element("th", titleOf(i), { scope: "row" }), element("td", shown(x, i)), element("td", shown(y, i)));
    return row;
  });
  byId("front-table").tHead.replaceChildren(head);
  byId("front-table").tBodies[0].replaceChildren(...rows);
}

function fill(select, entries, chosen) {
  select.replaceChildren(...entries.map(([value, text]) => element("option", text, { value })));
  select.value = chosen;
}

function startTradeoff() {
  const place = byId("pareto");
  if (!place) return;
  const metrics = DATA.metrics.filter((column) => column.axis).map((column) => [column.name, axisTitle(column)]);
  fill(byId("axis-x"), metrics, view.x);
  fill(byId("axis-y"), metrics, view.y);
  fill(byId("axis-hue"), [["", "nothing"], ...DATA.hues.map((name) => [name, name])], view.hue);
  const changed = () => {
    [view.x, view.y, view.hue] = [byId("axis-x").value, byId("axis-y").value, byId("axis-hue").value];
    view.hidden.clear();
    frontChanged();
    drawLegend();
    drawTradeoff(place);
    drawFrontTable();
    drawTable();
  };
  byId("axes").addEventListener("change", changed);
  byId("axes").addEventListener("submit", (event) => event.preventDefault());
  byId("zoom-out").addEventListener("click", () => Plotly.relayout(place, { "xaxis.autorange": true, "yaxis.autorange": true }));
  frontChanged();
  drawLegend();
  keepDrawn(place, drawTradeoff);
  drawFrontTable();
  place.on("plotly_hover", (event) => showCard(event.points[0].customdata, event.event));
  place.on("plotly_unhover", hideCard);
  document.addEventListener("keydown", (event) => event.key === "Escape" && hideCard());
  place.on("plotly_click", (event) => choose(event.points[0].customdata, false));
}
