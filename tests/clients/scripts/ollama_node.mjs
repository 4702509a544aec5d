// ollama for Node: list, show, ps, pull, chat, stream, generate, a schema.
import assert from "node:assert";
import { Ollama } from "ollama";

const model = process.env.MODEL;
const client = new Ollama({ host: process.env.URL });
const messages = [{ role: "user", content: "Say hello." }];
const options = { num_predict: 10, temperature: 0 };
assert((await client.list()).models.map((each) => each.model).includes(model));
assert((await client.show({ model })).capabilities.includes("completion"));
assert.equal((await client.pull({ model })).status, "success");
const whole = await client.chat({ model, messages, options, keep_alive: "10m" });
assert(whole.message.content);
let text = "";
for await (const piece of await client.chat({ model, messages, options, stream: true })) {
  text += piece.message.content;
}
assert.equal(text, whole.message.content);
assert((await client.ps()).models.map((each) => each.model).includes(model));
const first = await client.generate({ model, prompt: "Say hello.", options });
const second = await client.generate({ model, prompt: "Again.", context: first.context, options });
assert(second.prompt_eval_count > first.prompt_eval_count);
const formed = await client.chat({
  model, messages, options: { num_predict: 200 },
  format: {
    type: "object",
    properties: { swims: { type: "boolean" } },
    required: ["swims"],
    additionalProperties: false,
  },
});
assert.equal(typeof JSON.parse(formed.message.content).swims, "boolean");
