// Loops of two tools with the official Node client: on its Responses WebSocket, over HTTP responses and over chat; prints
// what was called and what was said as JSON.

const OpenAI = require("openai");
const { ResponsesWS } = require("openai/resources/responses/ws");

const [baseURL, apiKey, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const QUESTION = "How warm is it?";
const CODE = {
  read_sensor: ({ city }) => (city === "Plze\u0148" ? "21.5" : "no such city"),
  to_fahrenheit: ({ celsius }) => String((celsius * 9) / 5 + 32),
};
const PARAMETERS = {
  read_sensor: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
  to_fahrenheit: { type: "object", properties: { celsius: { type: "number" } }, required: ["celsius"] },
};
const tools = Object.entries(PARAMETERS).map(([name, parameters]) => ({ type: "function", name, parameters }));

async function main() {
  const result = { socket: await overSocket(), http: await loop(overHttp), chat: [] };
  for (const stream of [false, true]) result.chat.push(await overChat(stream));
  process.stdout.write(JSON.stringify(result));
}

async function loop(ask) {
  const called = [];
  let response = await ask({ input: QUESTION });
  for (;;) {
    const calls = response.output.filter((item) => item.type === "function_call");
    if (!calls.length) return { called, said: response.output_text ?? response.output[0].content[0].text };
    const input = calls.map(({ name, call_id, arguments: written }) => {
      called.push([name, JSON.parse(written)]);
      return { type: "function_call_output", call_id, output: CODE[name](JSON.parse(written)) };
    });
    response = await ask({ input, previous_response_id: response.id });
  }
}

async function overSocket() {
  const socket = new ResponsesWS(client);
  const events = socket.stream();
  const result = await loop(async (fields) => {
    socket.send({ type: "response.create", model, tools, store: false, ...fields });
    let written = "";
    for (;;) {
      const { value } = await events.next();
      if (value.type === "error") throw value.error;
      if (value.type !== "message") continue;
      const event = value.message;
      if (event.type === "response.function_call_arguments.delta") written += event.delta;
      if (event.type === "response.function_call_arguments.done" && event.arguments !== written) throw written;
      if (event.type === "response.completed") return event.response;
    }
  });
  socket.close();
  return result;
}

const overHttp = (fields) => client.responses.stream({ model, tools, ...fields }).finalResponse();

async function overChat(stream) {
  const called = [];
  const runner = client.chat.completions.runTools({
    model,
    stream,
    messages: [{ role: "user", content: QUESTION }],
    tools: tools.map(({ name, parameters }) => ({
      type: "function",
      function: {
        name,
        parameters,
        parse: JSON.parse,
        function: (args) => (called.push([name, args]), CODE[name](args)),
      },
    })),
  });
  return { called, said: await runner.finalContent() };
}

main();
