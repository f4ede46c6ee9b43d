// The chosen point: its figures, its YAML, and the command that runs it again.

function fileOf(i) {
  return `${DATA.file}-${DATA.keys[i].replace(/[^A-Za-z0-9]/g, "").slice(0, 8)}.yaml`;
}

function commandOf(i) {
  return `moetier ${valueOf(DATA.verbs, i)} ${fileOf(i)}`;
}

/** A shell command that writes the YAML and runs it; nothing in the text is expanded. */
function shellOf(i) {
  const lines = new Set(yamlOf(i).split("\n"));
  let end = "END_OF_YAML";
  while (lines.has(end)) end += "_";
  return `cat > ${fileOf(i)} <<'${end}'\n${yamlOf(i)}${end}\n${commandOf(i)}\n`;
}

function choose(i, bring) {
  if (i === undefined || i === null) return;
  view.chosen = i;
  hideCard();
  const [x, y] = [METRICS.get(view.x), METRICS.get(view.y)];
  const said = [x, y].filter(Boolean).map((column) => `${column.label} ${shown(column, i)}`);
  byId("status").textContent = isDone(i) ? `${titleOf(i)}: ${said.join(", ")}` : `${titleOf(i)}: failed, ${valueOf(DATA.errors, i)}`;
  byId("chosen").hidden = false;
  fillTable(i);
  const warnings = warningsOf(i);
  const list = element("ul");
  for (const text of warnings) list.append(element("li", text));
  byId("chosen-warnings").replaceChildren(...(warnings.length ? [element("p", "Warnings of this point:"), list] : []));
  byId("chosen-warnings").className = warnings.length ? "note bad" : "";
  linkTimeline(i);
  const yaml = yamlOf(i);
  byId("chosen-yaml").textContent = yaml || "Not known: the point's file is not in the folder, or it failed.";
  byId("chosen-command").textContent = yaml ? commandOf(i) : "-";
  for (const name of ["copy-command", "copy-both", "save-yaml", "copy-yaml"]) byId(name).disabled = !yaml;
  byId("copied").textContent = yaml ? `The command reads ${fileOf(i)}: save it first, or copy both.` : "";
  if (byId("pareto")) drawTradeoff(byId("pareto"));
  markRow();
  if (bring) {
    byId("point-title").focus({ preventScroll: true });
    byId("point").scrollIntoView({ block: "start" });
  }
}

/** Lead to the point's timeline, if this report has it. */
function linkTimeline(i) {
  const place = byId("chosen-timeline");
  const name = (DATA.timelines.find(([at]) => at === i) || [])[1];
  if (name) place.replaceChildren(element("a", "Its timeline", { href: `#${name}` }));
  else place.replaceChildren("No timeline of it is in this report; ", element("code", `moetier report FOLDER --timeline-of ${DATA.keys[i].slice(0, 8)}`), " adds it.");
}

function fillTable(i) {
  const rows = [];
  const add = (name, value, per) => {
    const row = element("tr");
    const head = element("th", name, { scope: "row" });
    if (per) head.append(" ", element("span", `of ${per}`, { class: "count" }));
    row.append(head, element("td", value, { class: "n" }));
    rows.push(row);
  };
  for (const axis of DATA.axes) if (valueOf(axis, i) !== null) add(axis.name, valueOf(axis, i));
  add(DATA.key_name, DATA.keys[i]);
  for (const column of DATA.metrics) add(column.label, shown(column, i), column.unit === "share" ? column.per : "");
  byId("chosen-table").tBodies[0].replaceChildren(...rows);
}

async function copy(text, what) {
  let done = false;
  try {
    await navigator.clipboard.writeText(text);
    done = true;
  } catch {
    const area = element("textarea", null, { "aria-hidden": "true", class: "skip" });
    area.value = text;
    document.body.append(area);
    area.select();
    done = document.execCommand("copy");
    area.remove();
  }
  byId("copied").textContent = done ? `${what} copied.` : `${what} could not be copied; select the text instead.`;
}

function save(i) {
  const link = element("a", null, { download: fileOf(i) });
  link.href = URL.createObjectURL(new Blob([yamlOf(i)], { type: "application/yaml" }));
  link.click();
  URL.revokeObjectURL(link.href);
  byId("copied").textContent = `${fileOf(i)} saved.`;
}

function startPoint() {
  if (!byId("point")) return;
  byId("copy-command").addEventListener("click", () => copy(commandOf(view.chosen), "Command"));
  byId("copy-both").addEventListener("click", () => copy(shellOf(view.chosen), "File and command"));
  byId("copy-yaml").addEventListener("click", () => copy(yamlOf(view.chosen), "YAML"));
  byId("save-yaml").addEventListener("click", () => save(view.chosen));
  const first = DATA.recommended ?? (DATA.n === 1 ? 0 : view.front[0]);
  if (first !== undefined) choose(first, false);
  else byId("status").textContent = "None is chosen yet.";
}
