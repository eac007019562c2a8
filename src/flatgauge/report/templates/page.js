"use strict";
(() => {
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const paper = matchMedia("print");
  const button = document.getElementById("theme");
  let printing = false;

  const theme = () => printing || paper.matches ? "light"
    : root.dataset.theme || (dark.matches ? "dark" : "light");

  // Pictures have no colours of their own for text and lines: they take those of the page.
  function template() {
    const style = getComputedStyle(root);
    const read = (name) => style.getPropertyValue(name).trim();
    const [text, soft, line] = [read("--text"), read("--soft"), read("--line")];
    const axis = { gridcolor: line, linecolor: soft, zerolinecolor: soft, tickcolor: soft, automargin: true };
    const title = { standoff: 10, font: { size: 13 } };
    const wall = { ...axis, color: text, showbackground: false };
    const clear = "rgba(0,0,0,0)";
    return {
      layout: {
        font: { family: "system-ui, sans-serif", size: 13, color: text },
        margin: { l: 56, r: 16, t: 28, b: 48 },
        paper_bgcolor: clear,
        plot_bgcolor: clear,
        xaxis: { ...axis, title },
        yaxis: { ...axis, title },
        scene: { xaxis: wall, yaxis: wall, zaxis: wall, bgcolor: clear },
        hoverlabel: { bgcolor: read("--raised"), bordercolor: line, font: { color: text } },
        colorway: ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00"],
      },
    };
  }

  const options = { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["lasso2d", "select2d"] };
  const plots = [...document.querySelectorAll(".plot")];
  const narrow = matchMedia("(max-width: 640px)"); // Panels stand in one column.

  function draw(plot, text, log) {
    const figure = JSON.parse(text);
    figure.layout.template = template();
    if (narrow.matches) Object.assign(figure.layout, figure.layout.meta?.narrow);
    // The element has the height, so that plotly keeps it whenever the page changes its size.
    plot.style.height = `${figure.layout.height ?? 400}px`;
    delete figure.layout.height;
    delete figure.layout.width;
    delete figure.layout.title; // It stands above the picture already.
    figure.layout.autosize = true;
    if (log) {
      const values = figure.data[0].type === "bar" ? "xaxis" : "yaxis";
      figure.layout[values] = { ...figure.layout[values], type: "log" };
    }
    return Plotly.react(plot, figure.data, figure.layout, options);
  }

  for (const plot of plots) {
    const holder = plot.closest("figure");
    const data = [...holder.querySelectorAll(".plot-data")].map((element) => element.textContent);
    const select = holder.querySelector("select");
    if (!select) {
      draw(plot, data[0], false);
      narrow.addEventListener("change", () => draw(plot, data[0], false));
      continue;
    }
    const log = holder.querySelector("input");
    const show = () => {
      const chosen = select.selectedOptions[0];
      if (log) log.disabled = chosen.dataset.positive !== "yes";
      holder.querySelector(".left-out").textContent = chosen.dataset.note;
      draw(plot, data[select.selectedIndex], Boolean(log?.checked && !log.disabled));
    };
    const choose = () => {
      if (log) log.checked = select.selectedOptions[0].dataset.wide === "yes";
      show();
    };
    select.addEventListener("change", choose);
    log?.addEventListener("change", show);
    narrow.addEventListener("change", show);
    choose();
  }

  function recolour() {
    const now = theme();
    button.textContent = now === "dark" ? "Light" : "Dark";
    button.setAttribute("aria-pressed", String(now === "dark"));
    for (const plot of plots) if (plot.data) Plotly.relayout(plot, { template: template() });
  }
  button.addEventListener("click", () => {
    root.dataset.theme = theme() === "dark" ? "light" : "dark";
    recolour();
  });
  dark.addEventListener("change", recolour);
  recolour();

  // On paper everything is open and light.
  let opened = [];
  function print(on) {
    if (on === printing) return;
    printing = on;
    if (on) {
      opened = [...document.querySelectorAll("details:not([open])")];
      for (const element of opened) element.open = true;
    } else {
      for (const element of opened) element.open = false;
    }
    recolour();
    for (const plot of plots) if (plot.data) Plotly.Plots.resize(plot);
  }
  addEventListener("beforeprint", () => print(true));
  addEventListener("afterprint", () => print(false));
  paper.addEventListener("change", (event) => print(event.matches));

  // Tables sort by their numbers, not by how these are written; what is no number comes last.
  const names = { nan: NaN, inf: Infinity, "-inf": -Infinity };
  function key(row, column) {
    const cell = row.cells[column];
    const given = cell.dataset.sort ?? cell.dataset.value;
    if (given === undefined) return cell.textContent.trim().toLowerCase();
    return given in names ? names[given] : Number(given);
  }
  function compare(a, b, sign) {
    if (typeof a === "string") return sign * a.localeCompare(b, "en", { numeric: true });
    if (Number.isNaN(a) || Number.isNaN(b)) return Number.isNaN(a) - Number.isNaN(b);
    return a === b ? 0 : sign * (a < b ? -1 : 1);
  }
  function sort(table, heading) {
    const column = heading.cellIndex;
    const sign = heading.getAttribute("aria-sort") === "ascending" ? -1 : 1;
    for (const other of heading.parentElement.cells)
      if (other.hasAttribute("aria-sort")) other.setAttribute("aria-sort", "none");
    heading.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
    for (const body of table.tBodies) {
      const rows = [...body.rows].filter((row) => !row.classList.contains("group"));
      rows.sort((a, b) => compare(key(a, column), key(b, column), sign));
      body.append(...rows);
    }
  }
  for (const table of document.querySelectorAll("table.sortable"))
    for (const heading of [...table.tHead.rows].at(-1).cells)
      heading.querySelector("button")?.addEventListener("click", () => sort(table, heading));

  document.getElementById("download").addEventListener("click", () => {
    const text = document.getElementById("flatgauge").textContent;
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
    link.download = "flatgauge.json";
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  });

  // The contents show where the reader is.
  const links = new Map([...document.querySelectorAll("nav a")].map((link) => [link.hash.slice(1), link]));
  const seen = new Set();
  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) seen[entry.isIntersecting ? "add" : "delete"](entry.target.id);
    const first = [...links.keys()].find((id) => seen.has(id));
    for (const [id, link] of links) link.toggleAttribute("aria-current", id === first);
  }, { rootMargin: "0px 0px -60% 0px" });
  for (const id of links.keys()) watcher.observe(document.getElementById(id));

  root.dataset.ready = "yes";
})();
