// What all figures share: size, margins, colours by series, and how they follow the page's width.

const { colors: COLORS, symbols: SYMBOLS } = DATA;
const SHAPES = {
  circle: "M7 2a5 5 0 1 0 .01 0z", square: "M2 2h10v10H2z", "triangle-up": "M7 1l6 11H1z",
  diamond: "M7 1l6 6-6 6-6-6z", "triangle-down": "M7 13L1 2h12z",
  cross: "M5 1h4v4h4v4H9v4H5V9H1V5h4z", x: "M3 1l4 4 4-4 2 2-4 4 4 4-2 2-4-4-4 4-2-2 4-4-4-4z",
  star: "M7 0l2 5h5l-4 3 2 6-5-4-5 4 2-6-4-3h5z",
};
const COARSE = window.matchMedia("(pointer: coarse)").matches;
const CONFIG = { displayModeBar: false, responsive: false, showTips: false, doubleClick: "reset" };
const FONT = "system-ui, sans-serif";

function look(at) {
  return { color: COLORS[at % COLORS.length], symbol: SYMBOLS[at % SYMBOLS.length] }; // 7 and 8: 56 pairs
}

/** A layout with what every figure has. */
function withDefaults(layout, narrow) {
  const axis = (given) => ({
    automargin: true, gridcolor: "#d5dbe1", zeroline: false, fixedrange: COARSE,
    ...given,
    title: { standoff: 10, font: { size: narrow ? 12 : 13 }, ...(given || {}).title },
    tickfont: { size: narrow ? 10 : 12 },
  });
  return {
    ...layout,
    autosize: true,
    font: { family: FONT, size: 12, color: "#444" },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    margin: { l: 10, r: narrow ? 12 : 24, t: 10, b: 10, ...layout.margin },
    dragmode: COARSE ? false : "zoom",
    hovermode: "closest",
    xaxis: axis(layout.xaxis),
    yaxis: axis(layout.yaxis),
    showlegend: false,
  };
}

const DRAWN = new Map(); // element -> function that draws it at the width it is given

function isNarrow(place) {
  return place.clientWidth < 520;
}

function keepDrawn(place, draw) {
  DRAWN.set(place, draw);
  draw(place);
}

const HATCHES = {
  "/": "M2 9l7-7M5 12l7-7", "\\": "M5 2l7 7M2 5l7 7", x: "M3 3l8 8M3 11l8-8", "-": "M2 5h10M2 9h10",
  "+": "M7 2v10M2 7h10", ".": "M4 4h1M9 4h1M4 9h1M9 9h1",
};

/** A drawing of 14 by 14 out of paths, each with its attributes. */
function drawing(...paths) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", "0 0 14 14");
  svg.setAttribute("aria-hidden", "true");
  for (const attributes of paths) {
    const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
    for (const [name, value] of Object.entries(attributes)) path.setAttribute(name, value);
    svg.append(path);
  }
  return svg;
}

/** The mark of a series, as it is in its figure: a shape, a dashed line, or a hatched box. */
function swatch(trace) {
  if (trace.mode === "lines") return drawing({ d: "M0 7h14", stroke: trace.line.color, "stroke-width": 2, "stroke-dasharray": "4 2" });
  const { color, symbol, pattern } = trace.marker;
  const hatch = HATCHES[(pattern || {}).shape];
  const box = { d: SHAPES[trace.type === "bar" ? "square" : symbol], fill: color };
  return hatch ? drawing(box, { d: hatch, stroke: "#fff", "stroke-width": 1.2 }) : drawing(box);
}

/** What the series of a figure are, below it: Plotly's own legend is no text and does not wrap. */
function legendBelow(place, traces) {
  const legend = element("ul", null, { class: "legend" });
  for (const trace of traces) {
    const item = element("li");
    item.append(swatch(trace), element("span", trace.meta));
    legend.append(item);
  }
  place.after(legend);
}

function drawSpec(name, spec) {
  const place = byId(name);
  if (!place) return;
  legendBelow(place, spec.traces);
  keepDrawn(place, (at) => Plotly.react(at, spec.traces, withDefaults(spec.layout, isNarrow(at)), CONFIG));
}

function redrawAll() {
  for (const [place, draw] of DRAWN) draw(place);
}

/** Draw anew when the width changes, and at the width of paper before printing. */
function followWidth() {
  let width = window.innerWidth;
  let waiting = 0;
  window.addEventListener("resize", () => {
    if (window.innerWidth === width) return;
    width = window.innerWidth;
    window.clearTimeout(waiting);
    waiting = window.setTimeout(redrawAll, 120);
  });
  const onPaper = (width_) => {
    for (const place of DRAWN.keys()) place.style.width = width_;
    redrawAll();
  };
  window.addEventListener("beforeprint", () => onPaper("660px"));
  window.addEventListener("afterprint", () => onPaper(""));
}
