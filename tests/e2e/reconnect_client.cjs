// The official Node client's Responses WebSocket on a server that closes old sockets: what is sent while it reconnects waits
// for the next socket; prints the close codes and what was said as JSON.

const OpenAI = require("openai");
const { ResponsesWS } = require("openai/resources/responses/ws");

const [baseURL, apiKey, model] = process.argv.slice(2);
const codes = [];
const said = [];
const reconnect = {
  onReconnecting({ closeCode }) {
    codes.push(closeCode);
    say("two");
  },
  initialDelay: 20,
};
const socket = new ResponsesWS(new OpenAI({ baseURL, apiKey }), { reconnect });

const say = (word) => socket.send({ type: "response.create", model, input: `say ${word}` });

socket.on("error", ({ error }) => {
  if (error?.error.code !== "websocket_connection_limit_reached") throw error;
});
socket.on("response.completed", ({ response }) => {
  said.push(response.output[0].content[0].text);
  if (said.length < 2) return;
  socket.close();
  process.stdout.write(JSON.stringify({ codes, said }));
});
say("one");
