// Of the suite's report: the setting, the videos in step, the heat map and its bitmaps.

const view = JSON.parse(byId("view").textContent);
const caseBox = byId("case");
const pointBox = byId("point");
const ramp = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]];

const state = { case: 0, group: 0, point: null };
const key = (configuration, index = state.case) => `${configuration}|${index}`;
const percent = (share) => `${(100 * share).toFixed(1)}%`;

function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

function bytesOf(id) {
  const text = atob(byId(id).textContent);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return bytes;
}

// ------------------------------------------------------------------------------------- videos

// All videos show one frame; the next one is asked for when all have shown it. So they cannot
// run apart, however slow one of them is.
class Player {
  constructor(frames, fps) {
    this.frames = frames;
    this.fps = fps;
    this.frame = 0;
    this.playing = false;
    this.videos = [];
    this.urls = new Map();
    this.busy = null;
    this.generation = 0;
  }

  address(clip) {
    if (clip.href) return clip.href;
    if (!this.urls.has(clip.id)) {
      const blob = new Blob([bytesOf(clip.id)], { type: "video/mp4" });
      this.urls.set(clip.id, URL.createObjectURL(blob));
    }
    return this.urls.get(clip.id);
  }

  video(clip, label) {
    const video = element("video", { muted: true, playsInline: true, preload: "auto" });
    video.disableRemotePlayback = true;
    video.setAttribute("role", "img");
    video.setAttribute("aria-label", label);
    video.src = this.address(clip);
    return video;
  }

  use(videos) {
    this.videos = videos;
    this.generation += 1;
    return this.show(this.frame);
  }

  show(frame) {
    this.frame = (frame + this.frames) % this.frames;
    byId("frame").value = this.frame;
    byId("frame").setAttribute("aria-valuetext", `frame ${this.frame + 1} of ${this.frames}`);
    byId("frame-name").textContent = `${this.frame + 1} of ${this.frames}`;
    this.busy ??= this.settle().finally(() => { this.busy = null; });
    return this.busy;
  }

  async settle() {
    let done = "";
    for (;;) {
      const [frame, videos] = [this.frame, this.videos];
      const wanted = `${this.generation} ${frame}`;
      if (wanted === done) return;
      await Promise.all(videos.map((video) => this.seek(video, frame)));
      done = wanted;
    }
  }

  async seek(video, frame) {
    // The middle of a frame: no rounding of times reaches the one beside it.
    const time = (frame + 0.5) / this.fps;
    if (video.readyState < 1) await this.event(video, "loadedmetadata");
    if (video.error) return;
    if (Math.abs(video.currentTime - time) > 1e-4 || video.readyState < 2) {
      const arrived = this.event(video, "seeked");
      video.currentTime = time;
      await arrived;
    }
    video.dataset.frame = frame;
  }

  event(video, name) {
    return new Promise((resolve) => {
      if (video.error) return resolve();
      const stop = new AbortController();
      const end = () => { stop.abort(); resolve(); };
      video.addEventListener(name, end, { signal: stop.signal });
      video.addEventListener("error", () => {
        video.closest("figure")?.classList.add("failed");
        end();
      }, { signal: stop.signal });
    });
  }

  async play() {
    this.playing = true;
    this.button();
    let due = performance.now();
    while (this.playing) {
      due = Math.max(due + 1000 / this.fps, performance.now());
      await new Promise((resolve) => setTimeout(resolve, due - performance.now()));
      if (this.playing) await this.show(this.frame + 1);
    }
  }

  pause() {
    this.playing = false;
    this.button();
  }

  toggle() {
    if (this.playing) this.pause();
    else this.play();
  }

  go(frame) {
    this.pause();
    return this.show(frame);
  }

  button() {
    byId("play").textContent = this.playing ? "Pause" : "Play";
    byId("play").setAttribute("aria-pressed", String(this.playing));
  }
}

const player = new Player(view.frames, view.fps);

function figureOf(configuration, difference) {
  const item = view.configurations[configuration];
  const clip = view.videos[key(configuration)];
  const quality = view.quality[key(configuration)];
  const text = view.cases[state.case].text;
  const caption = element("figcaption", {}, element("b", { textContent: item.name }));
  if (quality) caption.append(element("span", { textContent: quality }));
  const figure = element("figure", {}, caption);
  figure.dataset.configuration = item.name;
  if (configuration === state.point) figure.classList.add("chosen");
  const screen = element("div", { className: "screen" });
  screen.style.setProperty("--shape", `${view.width} / ${view.height}`);
  figure.prepend(screen);
  if (!clip) return null;
  const videos = [player.video(clip, `${item.name}: ${text}`)];
  if (difference !== undefined && view.videos[key(difference)]) {
    videos.push(player.video(view.videos[key(difference)], `dense, subtracted from ${item.name}`));
    videos[1].className = "over";
    screen.classList.add("difference");
    caption.querySelector("b").textContent = `${item.name}, difference to dense`;
  }
  screen.append(...videos);
  screen.addEventListener("click", () => player.toggle());
  return { figure, videos };
}

function drawVideos() {
  const all = document.querySelector("input[name=shown]:checked").value === "all";
  const difference = byId("difference")?.checked;
  let shown = view.configurations.map((_, index) => index);
  if (!all && state.point !== null) {
    const { steps } = view.configurations[state.point];
    shown = shown.filter((index) => {
      const item = view.configurations[index];
      return index === state.point || (item.kind !== "lite" && item.steps === steps);
    });
  }
  const made = [];
  for (const index of shown) {
    made.push(figureOf(index));
    const dense = view.configurations[index].dense;
    if (difference && dense !== null && view.configurations[index].kind === "lite") {
      if (all) made.pop();
      made.push(figureOf(index, dense));
    }
  }
  const found = made.filter(Boolean);
  const screens = byId("screens");
  screens.classList.toggle("pair", !all);
  screens.replaceChildren(...found.map(({ figure }) => figure));
  if (!found.length) screens.append("No video of this prompt was made.");
  return player.use(found.flatMap(({ videos }) => videos));
}

byId("play").addEventListener("click", () => player.toggle());
byId("back").addEventListener("click", () => player.go(player.frame - 1));
byId("forth").addEventListener("click", () => player.go(player.frame + 1));
byId("frame").addEventListener("input", () => player.go(Number(byId("frame").value)));
for (const box of document.querySelectorAll("input[name=shown], #difference")) {
  box.addEventListener("change", drawVideos);
}
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || byId("bitmap").open) return;
  if (event.target.closest("button, select, input, a, [role=button], [role=gridcell]") && event.key === " ") return;
  if (event.target.closest("select")) return;
  const actions = {
    " ": () => player.toggle(),
    ",": () => player.go(player.frame - 1),
    ".": () => player.go(player.frame + 1),
  };
  if (!actions[event.key]) return;
  event.preventDefault();
  actions[event.key]();
});

// ------------------------------------------------------------------------------------ setting

function drawGroup() {
  const group = view.groups[state.group];
  byId("point-label").textContent = group.label;
  pointBox.max = group.points.length - 1;
  // One setting leaves nothing to choose.
  pointBox.hidden = byId("point-ticks").hidden = group.points.length < 2;
  byId("point-ticks").replaceChildren(
    ...group.points.map((index) => element("span", { textContent: view.configurations[index].label })),
  );
}

function choose(configuration) {
  state.point = configuration;
  state.group = view.groups.findIndex(({ points }) => points.includes(configuration));
  const position = view.groups[state.group].points.indexOf(configuration);
  document.querySelectorAll("input[name=group]")[state.group].checked = true;
  drawGroup();
  pointBox.value = position;
  const item = view.configurations[configuration];
  pointBox.setAttribute("aria-valuetext", item.name);
  byId("point-name").textContent = item.label;
  [...byId("point-ticks").children].forEach((tick, i) => tick.classList.toggle("here", i === position));
  for (const card of document.querySelectorAll("#cards [data-figure]")) {
    const [value, more] = item.cards[card.dataset.figure] ?? ["", ""];
    card.querySelector(".value").textContent = value || "–";
    card.querySelector(".more").textContent = more;
  }
  for (const mark of document.querySelectorAll("[data-series], [data-choose]")) {
    const named = mark.dataset.choose ?? mark.dataset.series;
    mark.classList.toggle("chosen", named === item.name);
  }
  for (const row of document.querySelectorAll(".sortable tbody tr")) {
    row.classList.toggle("chosen", row.cells[0].dataset.value === item.name);
  }
  drawVideos();
  drawHeat();
}

function chooseNamed(name) {
  const found = view.configurations.findIndex((item) => item.name === name);
  if (found >= 0) choose(found);
}

caseBox.addEventListener("change", () => {
  state.case = Number(caseBox.value);
  drawVideos();
  drawHeat();
});
if (view.groups.length) {
  pointBox.addEventListener("input", () => choose(view.groups[state.group].points[pointBox.value]));
  for (const box of document.querySelectorAll("input[name=group]")) {
    box.addEventListener("change", () => {
      const { points } = view.groups[Number(box.value)];
      choose(points[Math.min(pointBox.value, points.length - 1)]);
    });
  }
  document.querySelector(".charts")?.classList.add("has-choice");
  for (const mark of document.querySelectorAll("[data-choose]")) {
    mark.addEventListener("click", () => chooseNamed(mark.dataset.choose));
    mark.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      chooseNamed(mark.dataset.choose);
    });
  }
}

// ----------------------------------------------------------------------------------- heat map

function colour(share, most) {
  const at = Math.min(1, most ? share / most : 0) * (ramp.length - 1);
  const low = Math.min(Math.floor(at), ramp.length - 2);
  const mixed = ramp[low].map((value, i) => Math.round(value + (at - low) * (ramp[low + 1][i] - value)));
  return `rgb(${mixed.join(" ")})`;
}

function drawHeat() {
  const table = byId("heat");
  if (!table) return;
  const focused = table.contains(document.activeElement) ? document.activeElement.dataset : null;
  const heat = view.heat[key(state.point)];
  const item = view.configurations[state.point];
  byId("heat-name").textContent = `${item.name}; ${view.cases[state.case].text}`;
  table.replaceChildren();
  if (!heat) {
    table.append(element("caption", { textContent: "This run was not made." }));
    return;
  }
  const most = Math.max(...heat.cells.flat().filter((cell) => cell !== null), 0);
  byId("ramp-most").textContent = percent(most);
  const every = Math.ceil(heat.steps.length / 25);
  const top = element("tr", {}, element("th", { scope: "col", textContent: "layer, step" }));
  heat.steps.forEach((step, i) => {
    top.append(element("th", { scope: "col", textContent: i % every ? "" : step }));
  });
  const rows = heat.layers.map((layer, y) => {
    const row = element("tr", {}, element("th", { scope: "row", textContent: layer }));
    heat.steps.forEach((step, x) => {
      const share = heat.cells[y][x];
      const cell = element("td", { tabIndex: -1 });
      const opens = share !== null && held(layer, step).length > 0;
      cell.setAttribute("role", "gridcell");
      Object.assign(cell.dataset, { layer, step, y, x });
      let text = `${layer}, step ${step}: `;
      if (share === null) {
        cell.className = "none";
        text += "no call";
      } else {
        cell.style.background = colour(share, most);
        text += `${percent(share)} skipped`;
        if (opens) {
          cell.classList.add("opens");
          cell.setAttribute("aria-haspopup", "dialog");
        } else {
          text += ", no bitmap here";
        }
      }
      cell.setAttribute("aria-label", text);
      cell.title = text;
      row.append(cell);
    });
    return row;
  });
  table.append(element("thead", {}, top), element("tbody", {}, ...rows));
  const start = (focused && cellAt(Number(focused.y), Number(focused.x))) || cellAt(0, heat.steps.length - 1);
  start.tabIndex = 0;
  if (focused) start.focus();
}

const cellAt = (y, x) => byId("heat").tBodies[0]?.querySelector(`td[data-y="${y}"][data-x="${x}"]`);
const held = (layer, step) =>
  (view.tiles[key(state.point)] ?? []).filter((one) => one.layer === layer && one.steps.includes(step));

byId("heat")?.addEventListener("keydown", (event) => {
  const cell = event.target.closest("td");
  if (!cell) return;
  if (event.key === "Enter" || event.key === " ") {
    event.preventDefault();
    openBitmap(cell);
    return;
  }
  const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
  let [y, x] = [Number(cell.dataset.y), Number(cell.dataset.x)];
  if (moves[event.key]) [y, x] = [y + moves[event.key][0], x + moves[event.key][1]];
  else if (event.key === "Home") x = 0;
  else if (event.key === "End") x = cell.parentElement.cells.length - 2;
  else return;
  event.preventDefault();
  const next = cellAt(y, x);
  if (!next) return;
  cell.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
});
byId("heat")?.addEventListener("click", (event) => {
  const cell = event.target.closest("td");
  if (!cell) return;
  byId("heat").querySelectorAll("td[tabindex='0']").forEach((other) => { other.tabIndex = -1; });
  cell.tabIndex = 0;
  cell.focus();
  openBitmap(cell);
});

// ------------------------------------------------------------------------------------ bitmaps

// Bits as the engines keep them: K block j of a row is bit j % 8 of byte j / 8. A step holds what
// changed since the step before, so that zlib finds little to store.
const unpacked = new Map();
async function unpack(one) {
  if (!unpacked.has(one.id)) {
    const stream = new Blob([bytesOf(one.id)]).stream().pipeThrough(new DecompressionStream("deflate"));
    const bits = new Uint8Array(await new Response(stream).arrayBuffer());
    const size = bits.length / one.steps.length;
    for (let i = size; i < bits.length; i++) bits[i] ^= bits[i - size];
    unpacked.set(one.id, bits);
  }
  return unpacked.get(one.id);
}

const bitmap = { layer: null, branch: null, step: 0, head: 0, kept: null };

// Tiles of one step and head, 1 where computed, row by row.
function panel(one, bits, step, head) {
  const bytes = Math.ceil(one.k / 8);
  const start = ((one.steps.indexOf(step) * one.heads) + head) * one.q * bytes;
  const kept = new Uint8Array(one.q * one.k);
  for (let q = 0; q < one.q; q++) {
    for (let k = 0; k < one.k; k++) {
      kept[q * one.k + k] = (bits[start + q * bytes + (k >> 3)] >> (k & 7)) & 1;
    }
  }
  return kept;
}

function paint(canvas, one, kept) {
  const probe = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const shade = (name) => {
    const mark = element("i");
    mark.style.color = `var(${name})`;
    document.body.append(mark);
    probe.fillStyle = getComputedStyle(mark).color;
    mark.remove();
    probe.fillRect(0, 0, 1, 1);
    return probe.getImageData(0, 0, 1, 1).data;
  };
  const colours = [shade("--skipped"), shade("--kept")];
  canvas.width = one.k;
  canvas.height = one.q;
  const context = canvas.getContext("2d", { willReadFrequently: true });
  const image = context.createImageData(one.k, one.q);
  kept.forEach((bit, i) => image.data.set(colours[bit], 4 * i));
  context.putImageData(image, 0, 0);
}

const skippedShare = (kept) => 1 - kept.reduce((sum, bit) => sum + bit, 0) / kept.length;
const headName = (one, index) =>
  (one.batch > 1 ? `batch ${Math.floor(index / (one.heads / one.batch))}, ` : "") + `head ${index % (one.heads / one.batch)}`;

function options(box, values, chosen) {
  box.replaceChildren(...values.map((value) => element("option", { value, textContent: value || "one", selected: value === chosen })));
}

function openBitmap(cell) {
  const found = held(cell.dataset.layer, Number(cell.dataset.step));
  if (!found.length) return;
  player.pause();
  bitmap.layer = found[0].layer;
  if (!found.some((one) => one.branch === bitmap.branch)) bitmap.branch = found[0].branch;
  bitmap.step = Number(cell.dataset.step);
  byId("bitmap").showModal();
  drawBitmap();
}

async function drawBitmap() {
  const lists = view.tiles[key(state.point)];
  const ofLayer = lists.filter((one) => one.layer === bitmap.layer);
  const one = ofLayer.find((each) => each.branch === bitmap.branch) ?? ofLayer[0];
  bitmap.branch = one.branch;
  if (!one.steps.includes(bitmap.step)) {
    bitmap.step = one.steps.reduce((a, b) => (Math.abs(b - bitmap.step) < Math.abs(a - bitmap.step) ? b : a));
  }
  bitmap.head = Math.min(bitmap.head, one.heads - 1);
  options(byId("bitmap-layer"), [...new Set(lists.map((each) => each.layer))], bitmap.layer);
  options(byId("bitmap-branch"), ofLayer.map((each) => each.branch), bitmap.branch);
  const box = byId("bitmap-step");
  box.max = one.steps.length - 1;
  box.value = one.steps.indexOf(bitmap.step);
  box.disabled = one.steps.length < 2;
  box.setAttribute("aria-valuetext", `step ${bitmap.step}`);
  byId("bitmap-step-name").textContent = String(bitmap.step);
  const wanted = JSON.stringify([one.id, bitmap.step, bitmap.head]);
  bitmap.wanted = wanted;
  const bits = await unpack(one);
  if (bitmap.wanted !== wanted) return; // another was asked for meanwhile
  const panels = Array.from({ length: one.heads }, (_, head) => panel(one, bits, bitmap.step, head));
  drawHeads(one, panels);
  const kept = panels[bitmap.head];
  Object.assign(bitmap, { kept, one });
  const text = `${headName(one, bitmap.head)}: ${percent(skippedShare(kept))} of ${kept.length.toLocaleString("en")} tiles skipped`;
  byId("bitmap-title").textContent = `${bitmap.layer}, ${bitmap.branch || "all branches"}, step ${bitmap.step}`;
  byId("bitmap-status").textContent = text;
  const canvas = byId("bitmap-canvas");
  canvas.setAttribute("aria-label", `${one.q} q blocks by ${one.k} K blocks. ${text}`);
  byId("bitmap-where").textContent = " ";
  paint(canvas, one, kept);
  canvas.dataset.ready = JSON.stringify({ ...one, step: bitmap.step, head: bitmap.head, configuration: state.point });
}

function drawHeads(one, panels) {
  const box = byId("bitmap-heads");
  const labels = [...box.querySelectorAll("label")];
  if (labels.length !== panels.length) {
    labels.forEach((label) => label.remove());
    panels.forEach((_, head) => {
      const input = element("input", { type: "radio", name: "head", value: head });
      input.addEventListener("change", () => { bitmap.head = head; drawBitmap(); });
      box.append(element("label", {}, input, element("canvas"), element("span")));
    });
  }
  box.querySelectorAll("label").forEach((label, head) => {
    label.querySelector("input").checked = head === bitmap.head;
    label.querySelector("canvas").setAttribute("aria-hidden", "true");
    label.querySelector("span").textContent = `${headName(one, head)}: ${percent(skippedShare(panels[head]))}`;
    paint(label.querySelector("canvas"), one, panels[head]);
  });
}

byId("bitmap-close").addEventListener("click", () => byId("bitmap").close());
byId("bitmap").addEventListener("click", (event) => {
  if (event.target === byId("bitmap")) byId("bitmap").close(); // beside it
});
byId("bitmap-layer").addEventListener("change", (event) => { bitmap.layer = event.target.value; drawBitmap(); });
byId("bitmap-branch").addEventListener("change", (event) => { bitmap.branch = event.target.value; drawBitmap(); });
byId("bitmap-step").addEventListener("input", (event) => { bitmap.step = bitmap.one.steps[event.target.value]; drawBitmap(); });
byId("bitmap-canvas").addEventListener("pointermove", (event) => {
  const { one, kept } = bitmap;
  if (!one) return;
  const box = event.currentTarget.getBoundingClientRect();
  const k = Math.min(one.k - 1, Math.max(0, Math.floor(((event.clientX - box.left) / box.width) * one.k)));
  const q = Math.min(one.q - 1, Math.max(0, Math.floor(((event.clientY - box.top) / box.height) * one.q)));
  const place = (block, size) => (size ? ` (tokens ${block * size} to ${Math.min((block + 1) * size, view.tokens) - 1})` : "");
  const { q_block, k_block } = view.tile ?? {};
  byId("bitmap-where").textContent =
    `q block ${q}${place(q, q_block)}, K block ${k}${place(k, k_block)}: ${kept[q * one.k + k] ? "computed" : "skipped"}`;
});
document.addEventListener("theme", () => { if (byId("bitmap").open) drawBitmap(); });

// --------------------------------------------------------------------------------------- begin

if (view.groups.length) choose(view.groups[0].points[view.groups[0].points.length - 1]);
else drawVideos();
