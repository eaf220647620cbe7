// OpenAI's client for Node: Chat Completions and Responses.
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const [base, model, realModel] = process.argv.slice(2);
const client = new OpenAI({ baseURL: base, apiKey: "none", maxRetries: 0, timeout: 120_000 });
const question = { role: "user", content: "What is the capital of France?" };
const weather = { role: "user", content: "How is the weather in Paris?" };
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"], additionalProperties: false };
const tool = { type: "function", function: { name: "get_weather", parameters, strict: true } };
const flat = { type: "function", ...tool.function };
const Person = z.object({ name: z.string(), age: z.number() });
const endless = { role: "user", content: "Tell an endless story." };
const again = { role: "user", content: "And what did I ask?" };
const sum = { role: "user", content: "Use the numbers 3, 7, 8 and 12, each exactly once, with + - * / to reach 45." };

async function nameOf(promise) {
  try {
    await promise;
    return "none";
  } catch (error) {
    return error.constructor.name;
  }
}

async function chat() {
  const ask = async (messages, more = {}) => (await client.chat.completions.create({ model, messages, ...more })).choices[0].message;
  const found = {};
  const first = await ask([question]);
  found.plain = first.content;
  found.stream = "";
  for await (const chunk of await client.chat.completions.create({ model, messages: [question], stream: true }))
    found.stream += chunk.choices[0]?.delta?.content ?? "";
  found.second = (await ask([question, first, again])).content;
  const call = await ask([weather], { tools: [tool] });
  found.call = call.tool_calls.map((each) => JSON.parse(each.function.arguments));
  const results = call.tool_calls.map((each) => ({ role: "tool", tool_call_id: each.id, content: "sunny" }));
  found.tool = (await ask([weather, call, ...results], { tools: [tool] })).content;
  const format = { response_format: zodResponseFormat(Person, "person") };
  found.parsed = (await client.chat.completions.parse({ model, messages: [question], ...format })).choices[0].message.parsed;
  found.cut = await nameOf(client.chat.completions.parse({ model, messages: [{ role: "user", content: "cut" }], ...format }));
  for await (const _ of await client.chat.completions.create({ model, messages: [endless], stream: true }))
    break; // which ends the request, and the job behind it
  const real = { model: realModel, max_tokens: 400 };
  const words = await ask([sum], real);
  found.real = Boolean((await ask([sum, words, weather, call, ...results, sum], real)).content);
  return found;
}

async function responses() {
  const ask = (input, more = {}) => client.responses.create({ model, input, ...more });
  const found = {};
  const first = await ask("What is the capital of France?");
  found.plain = first.output_text;
  found.stream = "";
  for await (const event of await ask([question], { stream: true }))
    if (event.type === "response.output_text.delta") found.stream += event.delta;
  found.second = (await ask([question, ...first.output, again])).output_text;
  const call = await ask([weather], { tools: [flat] });
  const calls = call.output.filter((item) => item.type === "function_call");
  found.call = calls.map((each) => JSON.parse(each.arguments));
  const results = calls.map((each) => ({ type: "function_call_output", call_id: each.call_id, output: "sunny" }));
  found.tool = (await ask([weather, ...call.output, ...results], { tools: [flat] })).output_text;
  const format = { format: zodTextFormat(Person, "person") };
  found.parsed = (await client.responses.parse({ model, input: [question], text: format })).output_parsed;
  found.cut = (await ask("cut")).status;
  for await (const _ of await ask([endless], { stream: true })) break;
  const real = { model: realModel, max_output_tokens: 400 };
  const words = await ask([sum], real);
  found.real = Boolean((await ask([sum, ...words.output, weather, ...call.output, ...results, sum], real)).output_text);
  return found;
}

async function errors() {
  const lost = new OpenAI({ baseURL: `${base}/nowhere`, apiKey: "none", maxRetries: 0 });
  const found = [];
  const calls = [
    () => client.embeddings.create({ model, input: "x" }),
    () => client.completions.create({ model, prompt: "x" }),
    () => lost.models.list(),
    () => client.models.retrieve("gpt-9"),
  ];
  for (const call of calls)
    await call().catch((error) => found.push([error.status, error.message.includes("no body")]));
  return found;
}

console.log(JSON.stringify({ chat: await chat(), responses: await responses(), errors: await errors() }));
