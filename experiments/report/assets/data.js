"use strict";
// What the report holds: points as columns, and how their values are written.

const DATA = JSON.parse(document.getElementById("data").textContent);
const METRICS = new Map(DATA.metrics.map((column) => [column.name, column]));
const ALL = Array.from({ length: DATA.n }, (_, i) => i);

/** Value number i of a column: a list, a table of texts with places, or one value for all. */
function valueOf(column, i) {
  if (column.values) return column.values[i];
  return column.texts ? column.texts[column.at[i]] : column.same;
}

function metric(name, i) {
  const column = METRICS.get(name);
  return column ? valueOf(column, i) : null;
}

/** The columns of the config that differ between points; of a search's seams the policy tells. */
const DIFFERING = DATA.axes.filter((axis) => !("same" in axis) && !axis.name.startsWith("policy."));

function policyOf(i) {
  const axis = DATA.axes.find((one) => one.name === "policy");
  return (axis && valueOf(axis, i)) || "policy";
}

function titleOf(i) {
  const rest = DIFFERING.filter((axis) => axis.name !== "policy").map((axis) => spell(axis.name, valueOf(axis, i)));
  return [policyOf(i), ...rest.filter(Boolean)].join(", ");
}

function spell(name, value) {
  if (value === null || value === undefined) return "";
  if (["policy", "hardware", "source"].includes(name)) return value;
  return `${name.split(".").pop()} ${value}`;
}

function axisTitle(column) {
  if (column.unit === "share") return column.label;
  return column.unit ? `${column.label} (${column.unit})` : column.label;
}

/** The value of a column in its unit, as a number to draw; null where it is not known. */
function drawn(column, i) {
  const value = valueOf(column, i);
  return typeof value === "number" ? value / column.scale : null;
}

function figure(value) {
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return Math.abs(value) >= 1e4 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(4)));
}

function shown(column, i) {
  const value = valueOf(column, i);
  if (value === null || value === undefined) return "-";
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (typeof value !== "number") return String(value);
  if (column.unit === "share") return `${(value * 100).toFixed(2)} %`;
  return figure(value / column.scale) + (column.unit ? ` ${column.unit}` : "");
}

function isDone(i) {
  return valueOf(DATA.status, i) === "done";
}

function yamlOf(i) {
  return DATA.yaml[i].map((at) => DATA.yaml_texts[at]).join("");
}

function warningsOf(i) {
  return DATA.warnings[i].map((at) => DATA.warning_texts[at]);
}

/** An element with text, which is never read as HTML. */
function element(tag, text, attributes) {
  const made = document.createElement(tag);
  if (text !== undefined && text !== null) made.textContent = text;
  for (const [name, value] of Object.entries(attributes || {})) made.setAttribute(name, value);
  return made;
}

function byId(id) {
  return document.getElementById(id);
}
