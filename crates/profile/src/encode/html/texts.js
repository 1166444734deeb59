'use strict';
// Texts and elements, for the report and for the list. Nothing that these show reaches the page other than as text, or as
// the address of a link whose scheme was checked.

const byId = (id) => document.getElementById(id);

// Control characters, and characters that hide or reorder others.
const UNSAFE =
  /[\u0000-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]/g;
const clean = (value) => {
  const text = String(value ?? '');
  return (text.length > LONGEST_TEXT ? `${text.slice(0, LONGEST_TEXT)}…` : text).replace(UNSAFE, '\ufffd');
};
const el = (tag, attributes, ...children) => {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) element.setAttribute(name, value);
  element.append(...children);
  return element;
};
const button = (text, onClick, attributes) => {
  const made = el('button', { type: 'button', ...attributes }, text);
  made.addEventListener('click', onClick);
  return made;
};
// Not `toLocaleString`: loading its tables takes a tenth of a second.
const grouped = (number) => String(number).replace(/\B(?=(\d{3})+$)/g, ',');
const count = (number, one, many = `${one}s`) => `${grouped(number)} ${number === 1 ? one : many}`;
const say = (text) => {
  byId('live').textContent = text;
};

/** A number of bytes with three digits and its unit: `1.20 GB`, `350 KB`. */
const memory = (bytes) => {
  const [unit, name] =
    bytes < 999.5 ? [1, 'B'] : bytes < 999.5e3 ? [1e3, 'KB'] : bytes < 999.5e6 ? [1e6, 'MB'] : [1e9, 'GB'];
  const value = bytes / unit;
  return `${value.toFixed(unit === 1 || value >= 99.95 ? 0 : value >= 9.995 ? 1 : 2)} ${name}`;
};

const two = (number) => String(number).padStart(2, '0');
/** A duration with three digits and its unit: `1.20 s`, `350 ms`. */
const duration = (ns) => {
  if (!(ns >= 0)) return 'unknown';
  if (ns >= 59.995e9) {
    const seconds = Math.round(ns / 1e9);
    return seconds < 3600
      ? `${Math.floor(seconds / 60)} min ${two(seconds % 60)} s`
      : `${Math.floor(seconds / 3600)} h ${two(Math.floor(seconds / 60) % 60)} min`;
  }
  const [size, unit] = ns < 999.5 ? [1, 'ns'] : ns < 999.5e3 ? [1e3, 'µs'] : ns < 999.5e6 ? [1e6, 'ms'] : [1e9, 's'];
  const value = ns / size;
  const digits = size === 1 || value >= 99.95 ? 0 : value >= 9.995 ? 1 : 2;
  return ns === 0 ? '0' : `${value.toFixed(digits)} ${unit}`;
};
const signed = (value, show) => (value === 0 ? '0' : `${value < 0 ? '−' : '+'}${show(Math.abs(value))}`);

/** The address if it is absolute and of an acceptable scheme, else null. */
const checkedUrl = (template, values, isGood) => {
  try {
    const filled = template.replace(/\{(\w+)\}/g, (all, name) => values[name] ?? all);
    const url = new URL(filled);
    return isGood(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
};
const traceUrl = (template, traceId, spanId) =>
  template &&
  traceId &&
  checkedUrl(
    template,
    { trace_id: encodeURIComponent(traceId), span_id: encodeURIComponent(spanId) },
    (scheme) => scheme === 'https:' || scheme === 'http:',
  );
