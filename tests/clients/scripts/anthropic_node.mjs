// @anthropic-ai/sdk: models, a message, a stream, a tool.
import assert from "node:assert";
import Anthropic from "@anthropic-ai/sdk";

const model = process.env.MODEL;
const client = new Anthropic({ baseURL: process.env.URL, apiKey: "none" });
const messages = [{ role: "user", content: "Say hello." }];
const listed = [];
for await (const each of client.models.list({ limit: 1 })) listed.push(each.id);
assert(listed.includes(model));
const whole = await client.messages.create({ model, messages, max_tokens: 10, temperature: 0 });
assert(whole.content[0].text);
const stream = client.messages.stream({ model, messages, max_tokens: 10, temperature: 0 });
assert.equal(await stream.finalText(), whole.content[0].text);
const called = await client.messages.create({
  model, messages, max_tokens: 200,
  tools: [{
    name: "weather",
    input_schema: {
      type: "object",
      properties: { city: { enum: ["Oslo", "Rome"] } },
      required: ["city"],
      additionalProperties: false,
    },
  }],
  tool_choice: { type: "tool", name: "weather" },
});
const use = called.content.find((block) => block.type === "tool_use");
assert(["Oslo", "Rome"].includes(use.input.city));
