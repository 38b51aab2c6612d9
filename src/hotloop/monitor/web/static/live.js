// Keeps the table of live trainings as it is now: every 2 s, while the page is looked at.
"use strict";

const table = document.getElementById("live");
const told = document.getElementById("live-status");
const none = document.getElementById("live-none");
let names = null;

function say(text) {
  if (told.textContent !== text) told.textContent = text;
}

function cell(text, link, head) {
  const made = document.createElement(head ? "th" : "td");
  if (head) Object.assign(made, { scope: "row", title: text }); // the title is whole, where the name is cut
  const inner = link ? made.appendChild(document.createElement("a")) : made;
  if (link) inner.href = link;
  inner.textContent = text;
  return made;
}

function show(rows) {
  const body = document.createElement("tbody");
  for (const row of rows) {
    const line = body.insertRow();
    row.cells.forEach((text, number) => line.append(cell(text, number === 0 ? row.link : "", number === 0)));
  }
  const at = document.activeElement; // a link keeps the keyboard's focus through a refresh
  const held = at && table.tBodies[0].contains(at) ? at.getAttribute("href") : null;
  table.tBodies[0].replaceWith(body);
  if (held) [...body.querySelectorAll("a")].find((link) => link.getAttribute("href") === held)?.focus();
  table.parentElement.hidden = rows.length === 0;
  none.hidden = rows.length > 0;
}

async function refresh() {
  if (!document.hidden) {
    try {
      const answer = await fetch("/api/live", { cache: "no-store" });
      if (!answer.ok) throw new Error(answer.statusText);
      const { rows } = await answer.json();
      show(rows);
      const now = rows.map((row) => `${row.cells[0]} ${row.cells[1]}`).join();
      // what changes every time is not read out; that a training began or ended is
      if (names !== null && names !== now) say(rows.length === 1 ? "1 process trains" : `${rows.length} processes train`);
      else if (told.dataset.lost) say("");
      names = now;
      delete told.dataset.lost;
    } catch {
      told.dataset.lost = "1";
      say("No answer from hotloop serve: what is shown may be old.");
    }
  }
  setTimeout(refresh, 2000);
}

refresh();
