// The official Node client over HTTP: chat, a stream, a completion and an error; prints what it got as JSON.

const OpenAI = require("openai");

const [baseURL, apiKey, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const messages = [{ role: "user", content: "say Hello" }];

async function main() {
  const chat = await client.chat.completions.create({ model, messages });
  const stream = await client.chat.completions.create({
    model,
    messages,
    stream: true,
    stream_options: { include_usage: true },
  });
  const streamed = { text: "", reasons: [], usage: null };
  for await (const chunk of stream) {
    streamed.text += chunk.choices[0]?.delta.content ?? "";
    if (chunk.choices[0]?.finish_reason) streamed.reasons.push(chunk.choices[0].finish_reason);
    streamed.usage = chunk.usage ?? streamed.usage;
  }
  const completion = await client.completions.create({ model, prompt: "say Bye\n" });
  let error = null;
  try {
    await client.chat.completions.create({ model, messages, temperature: -1 });
  } catch (caught) {
    error = { kind: caught.constructor.name, status: caught.status, param: caught.param, message: caught.message };
  }
  process.stdout.write(JSON.stringify({ chat, streamed, completion, error }));
}

main();
