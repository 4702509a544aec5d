// Vercel's ai with an OpenAI-compatible provider and with OpenAI's own: text, stream, tool, object.
import assert from "node:assert";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, streamText, tool } from "ai";
import { z } from "zod";

const baseURL = `${process.env.URL}/v1`;
const compatible = createOpenAICompatible({
  name: "penstock", baseURL, apiKey: "none", supportsStructuredOutputs: true,
});
const openai = createOpenAI({ baseURL, apiKey: "none" });
const weather = tool({
  description: "The weather.",
  inputSchema: z.object({ city: z.enum(["Oslo", "Rome"]) }),
  execute: async ({ city }) => `It is sunny in ${city}.`,
});
for (const model of [compatible(process.env.MODEL), openai(process.env.MODEL)]) {
  const whole = await generateText({ model, prompt: "Say hello.", maxOutputTokens: 10 });
  assert(whole.text);
  const stream = streamText({ model, prompt: "Say hello.", maxOutputTokens: 10 });
  let text = "";
  for await (const piece of stream.textStream) text += piece;
  assert(text);
  const called = await generateText({
    model, prompt: "How is the weather in Rome?", maxOutputTokens: 200, tools: { weather },
    toolChoice: { type: "tool", toolName: "weather" },
  });
  assert.match(called.toolResults[0].output, /sunny/);
  const made = await generateObject({
    model, prompt: "Invent a person.", maxOutputTokens: 100,
    schema: z.object({ name: z.enum(["Ada", "Grace"]), swims: z.boolean() }),
  });
  assert.equal(typeof made.object.swims, "boolean");
}
