// Vercel's AI SDK with its three providers for this API.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [base, model, realModel] = process.argv.slice(2);
let stop; // aborted as soon as a stream is answered: openai.chat hands nothing of it out before its first text
async function fetchAndStop(...request) {
  const answer = await fetch(...request);
  stop?.abort();
  return answer;
}
const common = { baseURL: base, apiKey: "none", fetch: fetchAndStop };
const openai = createOpenAI(common);
const compatible = createOpenAICompatible({ name: "reasoner", supportsStructuredOutputs: true, ...common });
const question = { role: "user", content: "What is the capital of France?" };
const weather = { role: "user", content: "How is the weather in Paris?" };
const story = { role: "user", content: "Tell an endless story." };
const sum = { role: "user", content: "Use the numbers 3, 7, 8 and 12, each exactly once, with + - * / to reach 45." };
const person = Output.object({ schema: z.object({ name: z.string(), age: z.number() }) });
const calls = [];
const tools = {
  get_weather: tool({
    description: "Tell the weather of a city.",
    inputSchema: z.object({ city: z.string() }),
    execute: async (input) => (calls.push(input), "sunny"),
  }),
};

async function run(make) {
  const ask = (messages, more = {}) => generateText({ model: make(model), messages, maxRetries: 0, ...more });
  const found = {};
  const first = await ask([question]);
  found.plain = first.text;
  const streamed = streamText({ model: make(model), messages: [question], maxRetries: 0 });
  found.stream = await streamed.text;
  found.second = (await ask([question, ...first.response.messages, { role: "user", content: "And what did I ask?" }])).text;
  calls.length = 0;
  const called = await ask([weather], { tools, stopWhen: stepCountIs(3) });
  found.call = [...calls];
  found.tool = called.text;
  found.parsed = (await ask([question], { output: person })).output;
  found.cut = (await ask([{ role: "user", content: "cut" }])).finishReason;
  try {
    await generateText({ model: make("nobody"), messages: [question], maxRetries: 0 });
  } catch (error) {
    found.error = error.name;
  }
  stop = new AbortController();
  const endless = streamText({ model: make(model), messages: [story], maxRetries: 0, abortSignal: stop.signal, onError: () => {} });
  await endless.consumeStream(); // ends with the request, and the job behind it
  found.aborted = stop.signal.aborted;
  stop = undefined;
  const real = { model: make(realModel), maxOutputTokens: 400 };
  const words = await ask([sum], real);
  const history = [sum, ...words.response.messages, weather, ...called.response.messages];
  found.real = Boolean((await ask([...history, sum], real)).text);
  return found;
}

const found = {};
for (const [name, make] of [["responses", (id) => openai(id)], ["chat", (id) => openai.chat(id)], ["compatible", (id) => compatible(id)]])
  found[name] = await run(make);
console.log(JSON.stringify(found));
