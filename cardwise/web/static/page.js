// Keeps the page up to date: cardwise/web/__init__.py describes the stream.
"use strict";

const page = document.body.dataset.page;
const problem = document.getElementById("problem");
// What the person has opened or typed stays as it is.
const morphing = {
  ignoreActiveValue: true,
  callbacks: {
    beforeAttributeUpdated: (name, element) => !(name === "open" && element.tagName === "DETAILS"),
    beforeNodeMorphed: (old) => !(old.classList?.contains("explanation") && old.dataset.loaded),
  },
};
let stream = null;

function show(message) {
  const began = performance.now();
  for (const [id, html] of Object.entries(message.parts ?? {})) {
    Idiomorph.morph(document.getElementById(id), html, morphing);
  }
  if ("problem" in message) {
    problem.textContent = message.problem;
    problem.hidden = !message.problem;
  }
  performance.measure("update", { start: began });
}

async function reload() {
  const response = await fetch(location.href);
  if (!response.ok) return location.reload();
  const fresh = new DOMParser().parseFromString(await response.text(), "text/html");
  Idiomorph.morph(document.getElementById("parts"), fresh.getElementById("parts"), morphing);
}

function open() {
  const query = new URLSearchParams(location.search);
  query.set("page", page);
  query.set("generation", document.body.dataset.generation);
  stream = new EventSource(`events?${query}`);
  stream.onmessage = (event) => {
    const message = JSON.parse(event.data);
    if (message.reload) reload();
    show(message);
  };
  stream.onerror = () => show({ problem: "No connection to cardwise web: what you see may be outdated." });
  stream.onopen = () => show({ problem: "" });
}

// A page that nobody sees takes none of the few connections of a browser to one server.
function openWhileVisible() {
  if (document.hidden) {
    stream?.close();
    stream = null;
  } else if (!stream) {
    open();
  }
}

if (page) {
  document.addEventListener("visibilitychange", openWhileVisible);
  window.addEventListener("pagehide", () => stream?.close());
  openWhileVisible();
}

document.addEventListener("toggle", async (event) => {
  const pod = event.target;
  if (!pod.open || !pod.dataset.explanation) return;
  const box = pod.querySelector(".explanation");
  const response = await fetch(pod.dataset.explanation);
  if (!response.ok) return;
  box.innerHTML = await response.text();
  box.dataset.loaded = "yes";
}, true);
