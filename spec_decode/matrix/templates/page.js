"use strict";
(() => {
  const root = document.documentElement, table = document.getElementById("table");
  const form = document.getElementById("filter"), shown = document.getElementById("shown");
  const names = ["device", "backend", "feature"];
  const fields = names.map((name) => document.getElementById("f-" + name));
  const cells = [...document.querySelectorAll("details[data-cell]")];

  function keep(value, own) { return !value || own === undefined || own === value; }

  function apply() {
    const [device, backend, feature] = fields.map((field) => field.value);
    for (const node of document.querySelectorAll("[data-device], [data-backend]")) {
      node.hidden = !(keep(device, node.dataset.device) && keep(backend, node.dataset.backend));
    }
    for (const body of table.tBodies) {
      const rows = [...body.querySelectorAll("[data-backend]")];
      body.hidden = body.hidden || !rows.some((row) => !row.hidden);
      const absent = body.querySelector(".absent");
      if (absent) absent.hidden = ![...absent.querySelectorAll("[data-backend]")].some((item) => !item.hidden);
    }
    const column = feature === "" ? 0 : Number(fields[2].selectedOptions[0].dataset.column) + 1;
    table.classList.toggle("one", feature !== "");
    for (const row of table.querySelectorAll("thead tr:not(.groups), tr[data-backend]")) {
      for (const cell of row.cells) {
        cell.hidden = feature !== "" && cell.cellIndex > 0 && cell.cellIndex !== column;
      }
    }
    const rows = [...table.querySelectorAll("tr[data-backend]")];
    const count = rows.filter((row) => !row.hidden && !row.parentNode.hidden).length;
    shown.textContent = count + " of " + rows.length + (rows.length === 1 ? " row shown" : " rows shown");
  }

  // The view is kept in the URL's fragment, which also works for a file on disk.
  function remember() {
    const state = new URLSearchParams();
    names.forEach((name, at) => { if (fields[at].value) state.set(name, fields[at].value); });
    const open = cells.find((cell) => cell.open);
    if (open) state.set("cell", open.dataset.cell);
    if (state.size || location.hash.includes("=")) history.replaceState(null, "", "#" + state);
  }

  function restore() {
    if (!location.hash.includes("=")) return;
    const state = new URLSearchParams(location.hash.slice(1));
    names.forEach((name, at) => {
      fields[at].value = state.get(name) || "";
      if (fields[at].selectedIndex < 0) fields[at].value = "";
    });
    apply();
    const open = cells.find((cell) => cell.dataset.cell === state.get("cell"));
    for (const cell of cells) cell.open = cell === open;
    if (open) open.scrollIntoView({ block: "center", inline: "center" });
  }

  form.hidden = false;
  form.addEventListener("change", () => { apply(); remember(); });
  form.addEventListener("reset", () => setTimeout(() => { apply(); remember(); }));
  restore();
  addEventListener("hashchange", restore);
  document.addEventListener("toggle", (event) => { if (event.target.dataset.cell) remember(); }, true);
  form.addEventListener("submit", (event) => event.preventDefault());

  document.addEventListener("keydown", (event) => {
    const open = event.key === "Escape" && document.querySelector("details[name][open]");
    if (open) { open.open = false; open.querySelector("summary").focus(); }
  });

  const button = document.getElementById("theme"), themes = ["system", "light", "dark"];
  function use(theme) {
    if (theme === "system") delete root.dataset.theme; else root.dataset.theme = theme;
    button.lastElementChild.textContent = theme;
  }
  let theme = "system";
  try { theme = localStorage.getItem("theme") || theme; } catch { /* a file on disk can lack storage */ }
  if (!themes.includes(theme)) theme = "system";
  use(theme);
  button.hidden = false;
  button.addEventListener("click", () => {
    theme = themes[(themes.indexOf(theme) + 1) % themes.length];
    use(theme);
    try { localStorage.setItem("theme", theme); } catch { /* as above */ }
  });
})();
