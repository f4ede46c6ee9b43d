// What hovering over a mark shows: policy, capacity and every metric. Not read out: the list below
// and the chosen point say the same.

function showCard(i, event) {
  if (i === undefined || COARSE) return;
  const card = byId("card");
  const list = element("dl");
  const pair = (name, value) => {
    const row = element("div");
    row.append(element("dt", name), element("dd", value));
    list.append(row);
  };
  for (const axis of DATA.axes) {
    const value = valueOf(axis, i);
    if (axis.name !== "policy" && value !== null && !axis.name.startsWith("policy.")) pair(axis.name, value);
  }
  for (const column of DATA.metrics) {
    const value = valueOf(column, i);
    if (value !== null && value !== undefined) pair(column.label, shown(column, i));
  }
  card.replaceChildren(element("h4", policyOf(i)), list);
  card.hidden = false;
  const { width, height } = card.getBoundingClientRect();
  const left = event.clientX + 18 + width < window.innerWidth ? event.clientX + 18 : event.clientX - 18 - width;
  const top = Math.min(event.clientY + 12, window.innerHeight - height - 8);
  card.style.left = `${Math.max(8, Math.min(left, window.innerWidth - width - 8))}px`;
  card.style.top = `${Math.max(8, top)}px`;
}

function hideCard() {
  byId("card").hidden = true;
}
