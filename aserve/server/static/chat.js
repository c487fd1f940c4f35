// The page: what the user sees and presses. The protocol lives in conversation.js.

import { Conversation } from "./conversation.js";
import { renderMarkdown } from "./markdown.js";

const KEY_ITEM = "aserve.apiKey";
const MAX_PROBE_DELAY_MS = 8000;

const page = Object.fromEntries([...document.querySelectorAll("[id]")].map((element) => [element.id, element]));
const socketUrl = new URL("v1/responses", document.baseURI);
socketUrl.protocol = socketUrl.protocol.replace("http", "ws");
const conversation = new Conversation(socketUrl);

/** The answer being written: {element, body, stats, text, startMs, firstMs, numDeltas, frame}. */
let answer = null;

// --- the server: model name, and whether it wants a key ---

async function probe(delayMs = 500) {
  const apiKey = sessionStorage.getItem(KEY_ITEM) ?? "";
  const headers = apiKey ? { Authorization: `Bearer ${apiKey}` } : {};
  const reply = await fetch("v1/models", { headers }).catch(() => null);
  if (reply?.status === 401 || reply?.status === 403) {
    askForKey(apiKey !== "");
    return;
  }
  if (!reply?.ok) {
    page.model.textContent = reply?.status === 503 ? "loading the model…" : "the server does not answer";
    setTimeout(probe, delayMs, Math.min(delayMs * 2, MAX_PROBE_DELAY_MS));
    return;
  }
  const { data } = await reply.json();
  page.model.textContent = data[0].id;
  page["key-form"].hidden = true;
  conversation.connect(apiKey);
}

function askForKey(wasWrong) {
  conversation.close();
  sessionStorage.removeItem(KEY_ITEM);
  page["key-note"].textContent = wasWrong ? "The server did not accept this key." : "Kept in this tab only.";
  page["key-form"].hidden = false;
  page.model.textContent = "API key needed";
  showState("offline");
  page["api-key"].focus();
}

page["key-form"].addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY_ITEM, page["api-key"].value.trim());
  page["api-key"].value = "";
  probe();
});

function showState(state) {
  page.connection.dataset.state = state;
  page.connection.textContent = state;
  page.connection.title = state;
}

let numFailures = 0;
conversation.addEventListener("state", ({ detail }) => {
  showState(detail.state);
  if (detail.state === "connected") numFailures = 0;
  // A refused handshake looks like a lost server: after a few, ask over HTTP which one it is.
  if (detail.state === "offline" && ++numFailures === 3) {
    numFailures = 0;
    conversation.close();
    probe();
  }
});
conversation.addEventListener("unauthorized", () => askForKey(true));

// --- the conversation ---

function addMessage(role, text) {
  page.welcome.hidden = true;
  const element = document.createElement("article");
  element.className = `message ${role}`;
  element.setAttribute("aria-label", role === "user" ? "You" : "Answer");
  const body = document.createElement("div");
  body.className = "body";
  body.textContent = text;
  element.append(body);
  page.messages.append(element);
  return { element, body };
}

function startAnswer() {
  const { element, body } = addMessage("assistant", "");
  element.classList.add("running");
  element.setAttribute("aria-busy", "true");
  const stats = document.createElement("div");
  stats.className = "stats";
  element.append(stats);
  answer = { element, body, stats, thoughts: null, text: "", startMs: performance.now(), firstMs: 0, numDeltas: 0, frame: 0 };
}

function isAtBottom() {
  const { scrollHeight, scrollTop, clientHeight } = page.messages;
  return scrollHeight - scrollTop - clientHeight < 48;
}

function scrollDown() {
  page.messages.scrollTop = page.messages.scrollHeight;
}

function draw() {
  if (answer === null) return;
  answer.frame = 0;
  const follow = isAtBottom();
  renderMarkdown(answer.body, answer.text);
  answer.stats.textContent = describeSpeed(answer, answer.numDeltas);
  if (follow) scrollDown();
}

function describeSpeed({ startMs, firstMs }, numTokens) {
  if (firstMs === 0) return "";
  const firstToken = `first token ${formatDuration(firstMs - startMs)}`;
  const elapsedS = (performance.now() - firstMs) / 1000;
  return numTokens > 1 && elapsedS > 0 ? `${((numTokens - 1) / elapsedS).toFixed(1)} tokens/s · ${firstToken}` : firstToken;
}

function formatDuration(ms) {
  return ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`;
}

conversation.addEventListener("thought", ({ detail }) => {
  answer.thoughts ??= addThoughts(answer.element);
  answer.thoughts.text.append(detail.text);
  countDelta();
});

conversation.addEventListener("delta", ({ detail }) => {
  if (answer.text === "") closeThoughts();
  answer.text += detail.text;
  countDelta();
});

function countDelta() {
  answer.firstMs ||= performance.now();
  answer.numDeltas += 1;
  answer.frame ||= requestAnimationFrame(draw);
}

/** What the model thinks is open while it does, and can be unfolded afterwards. */
function addThoughts(element) {
  const details = document.createElement("details");
  details.className = "thoughts";
  details.open = true;
  const summary = document.createElement("summary");
  summary.textContent = "Thinking";
  const text = document.createElement("div");
  details.append(summary, text);
  element.prepend(details);
  return { details, summary, text };
}

function closeThoughts() {
  if (answer.thoughts === null) return;
  answer.thoughts.summary.textContent = "Thoughts";
  answer.thoughts.details.open = answer.text === "" && !conversation.isRunning; // alone, they are all there is to see
}

conversation.addEventListener("end", ({ detail }) => {
  cancelAnimationFrame(answer.frame);
  const follow = isAtBottom();
  renderMarkdown(answer.body, answer.text);
  if (answer.text === "") closeThoughts();
  answer.stats.textContent = describeEnd(detail);
  answer.element.classList.remove("running");
  answer.element.removeAttribute("aria-busy");
  answer.element.dataset.status = detail.status;
  if (detail.status === "failed") {
    showError(detail.error ?? "The answer failed.");
    if (answer.text === "") answer.element.remove();
  }
  answer = null;
  if (follow) scrollDown();
  updateButtons();
  page.prompt.focus();
});

function describeEnd({ status, usage }) {
  const parts = [describeSpeed(answer, usage?.output_tokens ?? answer.numDeltas)];
  if (usage) parts.push(`${usage.output_tokens} tokens`);
  if (status === "cancelled") parts.push("stopped");
  if (status === "incomplete") parts.push("cut at the token limit");
  return parts.filter(Boolean).join(" · ");
}

function showError(text) {
  page.error.textContent = text;
  page.error.hidden = text === "";
}

function updateButtons() {
  const isRunning = conversation.isRunning;
  page.stop.hidden = !isRunning;
  page.send.hidden = isRunning;
  page.send.disabled = page.prompt.value.trim() === "";
}

function readOptions() {
  const options = {};
  if (page.instructions.value.trim()) options.instructions = page.instructions.value.trim();
  if (page.temperature.value !== "") options.temperature = page.temperature.valueAsNumber;
  if (page["max-tokens"].value !== "") options.max_output_tokens = page["max-tokens"].valueAsNumber;
  return options;
}

// --- controls ---

page.composer.addEventListener("submit", (event) => {
  event.preventDefault();
  const text = page.prompt.value.trim();
  if (text === "" || conversation.isRunning) return;
  if (!page.settings.reportValidity()) return;
  showError("");
  page.prompt.value = "";
  fitPrompt();
  addMessage("user", text);
  startAnswer();
  scrollDown();
  conversation.send(text, readOptions());
  updateButtons();
});

page.prompt.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  page.composer.requestSubmit();
});

function fitPrompt() {
  page.prompt.style.height = "auto";
  page.prompt.style.height = `${page.prompt.scrollHeight}px`;
  updateButtons();
}

page.prompt.addEventListener("input", fitPrompt);
page.stop.addEventListener("click", () => conversation.stop());

page["new-chat"].addEventListener("click", () => {
  conversation.reset();
  page.messages.replaceChildren(page.welcome);
  page.welcome.hidden = false;
  showError("");
  updateButtons();
  page.prompt.focus();
});

page["settings-toggle"].addEventListener("click", () => {
  page.settings.hidden = !page.settings.hidden;
  page["settings-toggle"].setAttribute("aria-expanded", String(!page.settings.hidden));
});
page.settings.addEventListener("submit", (event) => event.preventDefault());

updateButtons();
probe();
