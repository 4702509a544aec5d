// openai for Node: chat, stream, a tool, a schema, responses.
import assert from "node:assert";
import OpenAI from "openai";

const model = process.env.MODEL;
const client = new OpenAI({ baseURL: `${process.env.URL}/v1`, apiKey: "none" });
const messages = [{ role: "user", content: "Say hello." }];
const schema = {
  type: "object",
  properties: { city: { enum: ["Oslo", "Rome"] } },
  required: ["city"],
  additionalProperties: false,
};
const names = (await client.models.list()).data.map((each) => each.id);
assert(names.includes(model));
const whole = await client.chat.completions.create({ model, messages, max_tokens: 10, temperature: 0 });
assert(whole.choices[0].message.content);
let text = "";
const stream = await client.chat.completions.create({
  model, messages, max_tokens: 10, temperature: 0, stream: true,
});
for await (const piece of stream) text += piece.choices[0]?.delta?.content ?? "";
assert.equal(text, whole.choices[0].message.content);
const called = await client.chat.completions.create({
  model, messages, max_tokens: 200,
  tools: [{ type: "function", function: { name: "weather", parameters: schema } }],
  tool_choice: { type: "function", function: { name: "weather" } },
});
const arguments_ = JSON.parse(called.choices[0].message.tool_calls[0].function.arguments);
assert(["Oslo", "Rome"].includes(arguments_.city));
const formed = await client.chat.completions.create({
  model, messages, max_tokens: 200,
  response_format: { type: "json_schema", json_schema: { name: "place", strict: true, schema } },
});
assert(["Oslo", "Rome"].includes(JSON.parse(formed.choices[0].message.content).city));
const response = await client.responses.create({ model, input: "Say hello.", max_output_tokens: 10 });
assert(response.output_text);
const events = await client.responses.create({
  model, input: "Again.", previous_response_id: response.id, max_output_tokens: 10, stream: true,
});
let last;
for await (const event of events) last = event;
assert(["response.completed", "response.incomplete"].includes(last.type));
