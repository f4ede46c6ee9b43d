// The list of all points, a page at a time: it sorts, finds, and chooses by button.

const PAGE = 25;
const LISTED = ["tpot_ms", "energy_mj_per_token", "byte_miss_rate", "miss_rate", "accuracy", "oracle_gap", "trials"];
const list = { page: 0, sort: null, down: false, find: "", onlyFront: false };

function listedColumns() {
  const names = [...new Set([view.x, view.y, ...LISTED])];
  return names.map((name) => METRICS.get(name)).filter((column) => column && !(column.same === null));
}

function listedPoints() {
  const onFront = new Set(view.front);
  const wanted = list.find.toLowerCase().split(/\s+/).filter(Boolean);
  let rows = ALL.filter((i) => !list.onlyFront || onFront.has(i));
  if (wanted.length) {
    rows = rows.filter((i) => {
      const text = `${titleOf(i)} ${valueOf(DATA.status, i)} ${DATA.keys[i]}`.toLowerCase();
      return wanted.every((word) => text.includes(word));
    });
  }
  if (list.sort === null) return rows;
  const of = list.sort === "point" ? titleOf : (i) => metric(list.sort, i);
  const sign = list.down ? -1 : 1;
  const compare = (a, b) => (typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b);
  return rows
    .map((i) => [of(i), i])
    .sort(([a, i], [b, j]) => {
      if (a === null || b === null) return (a === null) - (b === null) || i - j; // unknown last
      return sign * compare(a, b) || i - j;
    })
    .map(([, i]) => i);
}

function headCell(name, text, isNumber) {
  const now = list.sort === name;
  const cell = element("th", null, { scope: "col", class: isNumber ? "n" : "", "aria-sort": now ? (list.down ? "descending" : "ascending") : "none" });
  const button = element("button", text + (now ? (list.down ? " ↓" : " ↑") : ""), { type: "button" });
  button.addEventListener("click", () => {
    list.down = now && !list.down;
    list.sort = name;
    list.page = 0;
    drawTable();
    byId("points-table").tHead.querySelector("[aria-sort$=ending] button").focus();
  });
  cell.append(button);
  return cell;
}

function drawTable() {
  const table = byId("points-table");
  if (!table) return;
  const columns = listedColumns();
  const points = listedPoints();
  const onFront = new Set(view.front);
  const pages = Math.max(1, Math.ceil(points.length / PAGE));
  list.page = Math.min(list.page, pages - 1);
  const head = element("tr");
  head.append(headCell("point", "point", false), element("th", "status", { scope: "col" }));
  for (const column of columns) head.append(headCell(column.name, axisTitle(column), true));
  const rows = points.slice(list.page * PAGE, (list.page + 1) * PAGE).map((i) => {
    const row = element("tr", null, { "data-point": i });
    const title = element("th", null, { scope: "row" });
    const button = element("button", titleOf(i), { type: "button" });
    button.addEventListener("click", () => choose(i, true));
    title.append(button);
    row.append(title, element("td", isDone(i) ? (onFront.has(i) ? "front" : "") : "failed"));
    for (const column of columns) row.append(element("td", shown(column, i), { class: "n" }));
    return row;
  });
  table.tHead.replaceChildren(head);
  table.tBodies[0].replaceChildren(...rows);
  byId("page-back").disabled = list.page === 0;
  byId("page-on").disabled = list.page >= pages - 1;
  const from = points.length ? list.page * PAGE + 1 : 0;
  byId("page-status").textContent = `${from} to ${Math.min((list.page + 1) * PAGE, points.length)} of ${points.length}`;
  markRow();
}

function markRow() {
  const table = byId("points-table");
  if (!table) return;
  for (const row of table.tBodies[0].rows) {
    const now = Number(row.dataset.point) === view.chosen;
    row.classList.toggle("now", now);
    if (now) row.querySelector("button").setAttribute("aria-current", "true");
    else row.querySelector("button").removeAttribute("aria-current");
  }
}

function startTable() {
  if (!byId("points-table")) return;
  const turn = (by) => {
    list.page += by;
    drawTable();
  };
  byId("page-back").addEventListener("click", () => turn(-1));
  byId("page-on").addEventListener("click", () => turn(1));
  byId("finder").addEventListener("submit", (event) => event.preventDefault());
  byId("finder").addEventListener("input", () => {
    [list.find, list.onlyFront, list.page] = [byId("find").value, byId("only-front").checked, 0];
    drawTable();
  });
  drawTable();
}
