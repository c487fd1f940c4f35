// One conversation with the official Node client over its Responses WebSocket; prints what it got as JSON.

const OpenAI = require("openai");
const { ResponsesWS } = require("openai/resources/responses/ws");

const [baseURL, apiKey] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey });
const socket = new ResponsesWS(client);
const turns = [];
let text = "";

socket.on("response.output_text.delta", (event) => (text += event.delta));
socket.on("response.completed", ({ response }) => {
  turns.push({ text, output: response.output[0].content[0].text, usage: response.usage, status: response.status });
  text = "";
  if (turns.length === 1) create({ input: "say Bye", previous_response_id: response.id });
  else create({ input: "say x", temperature: -1 });
});
socket.on("error", (error) => {
  process.stdout.write(JSON.stringify({ turns, error: error.error ?? { message: String(error) } }));
  socket.close();
});

function create(fields) {
  socket.send({ type: "response.create", model: "scripted", stream: true, ...fields });
}

create({ input: "say Hello" });
