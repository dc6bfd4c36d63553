// The plots. plotly.js comes compressed and is run once the page stands; its digest is in the page's policy.

async function loadPlotly() {
  const script = document.createElement("script");
  script.textContent = await unpack(await packedText("plotly"));
  document.head.append(script);
  if (!globalThis.Plotly) throw new Error("the browser did not run plotly.js");
}

const themed = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function layoutOf(view) {
  const line = { gridcolor: themed("--line"), zerolinecolor: themed("--strong-line"), linecolor: themed("--strong-line"), automargin: true };
  const axis = (given) => ({ ...line, ...given, title: { standoff: 8, ...given?.title } });
  return {
    margin: { l: 52, r: 14, t: 8, b: 44 }, bargap: 0.25, hovermode: "closest", dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { family: themed("--font"), size: 12.5, color: themed("--text") },
    showlegend: view.data.filter((trace) => trace.showlegend !== false).length > 1,
    hoverlabel: { bgcolor: themed("--panel"), bordercolor: themed("--strong-line"), font: { color: themed("--text") } },
    ...view.layout, legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, ...view.layout.legend }, xaxis: axis(view.layout.xaxis), yaxis: axis(view.layout.yaxis),
  };
}

class Plots {
  constructor(figures, choose) {
    this.choose = choose;
    this.shown = figures.map((figure) => this.add(figure));
  }

  add(figure) {
    const plot = el("div", { class: "plot", id: `plot-${figure.id}`, role: "img", "aria-label": `${figure.title}. ${figure.caption}` });
    const shown = { figure, plot, view: figure.views[0] };
    const buttons = figure.views.map((view) => el("button", {
      type: "button", "aria-pressed": String(view === shown.view), on: { click: () => {
        shown.view = view;
        buttons.forEach((button, position) => button.setAttribute("aria-pressed", String(figure.views[position] === view)));
        this.draw(shown);
      } },
    }, view.label));
    (at(figure.id === "differences" ? "change" : "figures")).append(el("figure", {},
      el("div", { class: "figure-head" }, el("h3", {}, figure.title), buttons.length > 1 ? el("div", { class: "views", role: "group", "aria-label": "View" }, buttons) : null),
      plot, el("figcaption", {}, figure.caption)));
    return shown;
  }

  async draw({ plot, view }) {
    if (!globalThis.Plotly) return;
    const options = { responsive: true, displaylogo: false, displayModeBar: false, showTips: false };
    await Plotly.react(plot, view.data, layoutOf(view), options);
    plot.removeAllListeners("plotly_click");
    plot.on("plotly_click", (event) => {
      const chosen = event.points[0]?.customdata;
      if (Array.isArray(chosen)) this.choose(...chosen);
    });
  }

  async drawAll() {
    for (const shown of this.shown) {
      await breath();
      await this.draw(shown);
    }
  }
}
