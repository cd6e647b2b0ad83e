"use strict";
(() => {
  const root = document.documentElement, table = document.getElementById("table");
  const form = document.getElementById("filter"), shown = document.getElementById("shown");
  const fields = ["device", "backend", "feature"].map((name) => document.getElementById("f-" + name));

  function keep(value, own) { return !value || own === undefined || own === value; }

  function apply() {
    const [device, backend, feature] = fields.map((field) => field.value);
    for (const node of document.querySelectorAll("[data-device], [data-backend]")) {
      node.hidden = !(keep(device, node.dataset.device) && keep(backend, node.dataset.backend));
    }
    for (const body of table.tBodies) {
      const rows = [...body.querySelectorAll("[data-backend]")];
      body.hidden = body.hidden || !rows.some((row) => !row.hidden);
    }
    table.classList.toggle("one", feature !== "");
    for (const row of table.querySelectorAll("thead tr:not(.groups), tr[data-backend]")) {
      for (const cell of row.cells) {
        cell.hidden = feature !== "" && cell.cellIndex > 0 && cell.cellIndex !== Number(feature) + 1;
      }
    }
    const rows = [...table.querySelectorAll("tr[data-backend]")];
    const count = rows.filter((row) => !row.hidden && !row.parentNode.hidden).length;
    shown.textContent = count + " of " + rows.length + " rows shown";
  }

  form.hidden = false;
  form.addEventListener("change", apply);
  form.addEventListener("reset", () => setTimeout(apply));
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
  try { theme = localStorage.getItem("theme") || theme; } catch { /* a file's storage may be closed */ }
  if (!themes.includes(theme)) theme = "system";
  use(theme);
  button.hidden = false;
  button.addEventListener("click", () => {
    theme = themes[(themes.indexOf(theme) + 1) % themes.length];
    use(theme);
    try { localStorage.setItem("theme", theme); } catch { /* as above */ }
  });
})();
