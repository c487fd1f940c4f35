// One conversation over the Responses WebSocket: keeps the socket open, the history, and the running turn.
//
// The server remembers the latest response of this socket, so a turn normally sends only its new message and
// `previous_response_id`. On a fresh socket, or when the server no longer has that response, the turn sends
// the full history instead.

const FIRST_DELAY_MS = 300;
const MAX_DELAY_MS = 8000;
const CANCEL_TIMEOUT_MS = 2000;
const KEY_PROTOCOL = "openai-insecure-api-key.";
const TERMINAL = new Set(["response.completed", "response.incomplete", "response.failed"]);
const RESEND = new Set(["previous_response_not_found", "websocket_connection_limit_reached"]);

/**
 * Events (all CustomEvent): `state` {state: connecting|connected|offline}, `unauthorized`, `delta` {text},
 * `end` {status, usage, error}: exactly one for each `send`.
 */
export class Conversation extends EventTarget {
  #url;
  #apiKey = "";
  #socket = null;
  #delayMs = FIRST_DELAY_MS;
  #timer = 0;
  #history = [];
  #previousId = null;
  #turn = null;
  #isClosed = false;

  constructor(url) {
    super();
    this.#url = url;
  }

  get isRunning() {
    return this.#turn !== null;
  }

  /** Open the socket and keep it open, from now on with this key ("" for none). */
  connect(apiKey) {
    this.#apiKey = apiKey;
    this.#isClosed = false;
    this.#delayMs = FIRST_DELAY_MS;
    this.#drop();
    this.#open();
  }

  /** Stop trying; `connect` starts again. */
  close() {
    this.#isClosed = true;
    this.#drop();
  }

  /** Send one user message; `options` are further fields of response.create. */
  send(text, options) {
    this.#history.push({ role: "user", content: text });
    this.#turn = { options, text: "", isSent: false, canResend: true };
    if (this.#isOpen()) this.#sendTurn();
    else this.#reconnectNow();
  }

  /** End the running answer; what has arrived stays. */
  stop() {
    const turn = this.#turn;
    if (turn === null) return;
    if (!turn.isSent || !this.#isOpen()) {
      this.#end({ status: "cancelled" });
      return;
    }
    this.#socket.send(JSON.stringify({ type: "response.cancel" }));
    setTimeout(() => {
      if (this.#turn !== turn) return;
      this.#end({ status: "cancelled" });
      this.#drop(); // leaving the socket aborts on the server
      this.#open();
    }, CANCEL_TIMEOUT_MS);
  }

  /** Forget everything and start anew. */
  reset() {
    this.stop();
    if (this.#turn !== null) {
      // Events of the old answer must not reach the new chat.
      this.#end({ status: "cancelled" });
      this.#drop();
      this.#open();
    }
    this.#history = [];
    this.#previousId = null;
  }

  #isOpen() {
    return this.#socket?.readyState === WebSocket.OPEN;
  }

  #open() {
    clearTimeout(this.#timer);
    this.#announce("state", { state: "connecting" });
    let socket;
    try {
      socket = new WebSocket(this.#url, this.#apiKey ? ["aserve.chat", KEY_PROTOCOL + this.#apiKey] : ["aserve.chat"]);
    } catch {
      this.#isClosed = true;
      this.#announce("unauthorized", {}); // the key has characters that a browser cannot send
      return;
    }
    this.#socket = socket;
    socket.onopen = () => {
      this.#delayMs = FIRST_DELAY_MS;
      this.#announce("state", { state: "connected" });
      if (this.#turn !== null && !this.#turn.isSent) this.#sendTurn();
    };
    socket.onmessage = (message) => this.#receive(JSON.parse(message.data));
    socket.onclose = () => this.#lose();
  }

  /** Leave the socket without hearing from it again. */
  #drop() {
    clearTimeout(this.#timer);
    const socket = this.#socket;
    this.#socket = null;
    this.#previousId = null;
    if (socket === null) return;
    socket.onopen = socket.onmessage = socket.onclose = null;
    socket.close();
  }

  #lose() {
    this.#socket = null;
    this.#previousId = null;
    this.#announce("state", { state: "offline" });
    if (this.#turn?.isSent) this.#end({ status: "failed", error: "The connection was lost." });
    if (this.#isClosed) return;
    this.#timer = setTimeout(() => this.#open(), this.#delayMs * (0.75 + Math.random() / 4));
    this.#delayMs = Math.min(this.#delayMs * 2, MAX_DELAY_MS);
  }

  #reconnectNow() {
    if (this.#socket === null && !this.#isClosed) this.#open();
  }

  #sendTurn() {
    const turn = this.#turn;
    turn.isSent = true;
    const input = this.#previousId === null ? this.#history : this.#history.slice(-1);
    this.#socket.send(JSON.stringify({
      type: "response.create",
      input: input.map((message) => ({ type: "message", ...message })),
      previous_response_id: this.#previousId,
      store: false, // the page keeps the conversation itself
      ...turn.options,
    }));
  }

  #receive(event) {
    if (event.type === "error") {
      this.#receiveError(event.error);
    } else if (this.#turn === null) {
      return;
    } else if (event.type === "response.output_text.delta") {
      this.#turn.text += event.delta;
      this.#announce("delta", { text: event.delta });
    } else if (event.type === "response.reasoning_text.delta") {
      this.#announce("thought", { text: event.delta });
    } else if (TERMINAL.has(event.type)) {
      const { response } = event;
      if (response.status !== "failed") this.#previousId = response.id;
      this.#end({ status: response.status, usage: response.usage, error: response.error?.message });
    }
  }

  #receiveError(error) {
    const turn = this.#turn;
    if (turn === null) return;
    if (RESEND.has(error.code) && turn.canResend && turn.text === "") {
      turn.canResend = false;
      this.#previousId = null;
      if (error.code === "previous_response_not_found") this.#sendTurn();
      else turn.isSent = false; // the server closes this socket; the next one sends the turn
      return;
    }
    this.#previousId = null;
    this.#end({ status: "failed", error: error.message });
  }

  #end(detail) {
    const turn = this.#turn;
    this.#turn = null;
    if (turn.text !== "") this.#history.push({ role: "assistant", content: turn.text });
    else this.#previousId = null; // a question without an answer: say it all again
    if (turn.text === "" && detail.status === "failed") this.#history.pop();
    this.#announce("end", detail);
  }

  #announce(type, detail) {
    this.dispatchEvent(new CustomEvent(type, { detail }));
  }
}
