// The rows of the admin API (docs/admin-api.md), and what the page keeps. Read by tsc only.

export type Bytes = Record<string, number>;

export interface Session {
  version: string;
  dashboard: "full" | "read-only" | "off";
  needs_key: boolean;
  role: "admin" | "client" | null;
  why: string;
  key: string | null;
  default_model: string | null;
}

export interface Domain {
  limit_bytes: number;
  capacity_bytes: number;
  spare_bytes: number;
  external_bytes: number;
  booked_bytes: number;
  read_bytes?: number | null;
  free_bytes: number;
  short: boolean;
  purposes: Bytes;
  owners: Record<string, Bytes>;
}

export interface Process {
  resident_bytes: number;
  private_bytes: number;
  anonymous_bytes: number;
}

export interface Memory {
  at?: number;
  domains: Record<string, Domain>;
  processes: Record<string, Process>;
  requests: { used_bytes: number; waiting: number; for_tokenizer: Record<string, number> };
  connections: { open: number; most: number; held_bytes: number; refused: number; gave_way: number };
  drift_reserve: Bytes;
}

export interface Point {
  at: number;
  domains: Record<string, Pick<Domain, "limit_bytes" | "capacity_bytes" | "booked_bytes" | "read_bytes" | "external_bytes" | "free_bytes" | "short">>;
}

export interface Model {
  name: string;
  state: "absent" | "loading" | "ready" | "draining" | "failed";
  bytes?: number;
  context?: number | null;
  leases?: number;
  pinned?: boolean;
  idle_s?: number;
  device?: string;
  dtype?: string;
  kv_dtype?: string;
  kv_bytes?: number;
  kv_tokens?: number;
  kv_used_bytes?: number;
  weight_bytes?: number;
  step_bytes?: number;
  requests?: number;
  aliases?: string[];
  ttl_s?: number | null;
  progress?: { phase: string; done_bytes: number; total_bytes: number };
  reason?: string;
  retry_after_s?: number;
  tokens_per_s?: number | null;
  running?: number;
  waiting?: number;
  cached_share?: number | null;
  drafts?: Record<string, { verified: number; accepted: number }>;
}

export interface Card {
  name: string;
  kind: string;
  architecture?: string;
  parameters?: number;
  bytes?: number;
  context?: number;
  dtype?: string;
  kv_dtype?: string;
  formats?: string[];
  stored_bytes?: number;
  source?: string;
  aliases?: string[];
}

export interface Plan {
  model: string;
  device: string;
  dtype: string;
  kv_dtype: string;
  domain: string;
  weight_bytes: number;
  step_bytes: number;
  window: number;
  kv_bytes: number;
  longest_context: number;
  concurrency_at_context: number;
  context_at_concurrency?: number;
  needed_bytes?: number;
  fits?: boolean;
  loaded: boolean;
  fixed_bytes: number;
  limit_bytes: number;
}

export interface LiveRequest {
  id: string;
  model: string;
  key: string;
  state: "checked" | "queued" | "running";
  waits_for: "model" | "memory" | "turn" | null;
  place: number | null;
  expected_start_s: number | null;
  priority: number;
  answers: number;
  prompt_tokens: number;
  cached_tokens: number | null;
  completion_tokens: number;
  max_tokens: number | null;
  tokens_per_s: number | null;
  kv_bytes: number;
  bytes: number;
  preemptions: number;
  age_s: number;
  waited_s: number | null;
  first_token_s: number | null;
}

export interface Requests {
  at: number;
  total: number;
  waiting: number;
  requests: LiveRequest[];
}

export interface Refusal {
  at: number;
  id: string;
  route: string;
  model: string | null;
  key: string;
  status: number;
  code: string;
  message: string;
  numbers: Record<string, unknown> | null;
  fits: { tokens: number | null; bytes: number | null } | null;
  retry_after_s: number | null;
}

export interface LogEvent {
  at: number;
  event: string;
  [field: string]: unknown;
}

export interface Setting {
  key: string;
  value: unknown;
  origin: string;
  about: string;
  holds: "now" | "reload" | "restart";
  changeable: boolean;
  choices: string[];
  unit: "bytes" | "s" | null;
  per_model: boolean;
}

export interface Task {
  id: string;
  kind: "pull" | "quantize" | "cache-verify" | "cache-clear" | "bench";
  subject: string;
  state: "running" | "done" | "failed" | "cancelled";
  phase: string;
  done: number;
  total: number;
  unit: string;
  began_at: number;
  ended_at: number | null;
  result: Record<string, any> | null;
  error: { message: string; code: string } | null;
}

export interface CacheFigures {
  dir: string;
  held_bytes: number;
  quota_bytes: number;
  free_bytes: number;
  other_files: number;
  other_bytes: number;
  models: { model: string | null; id: string; files: number; bytes: number; last_used: string | null }[];
  loaded: Record<string, { prompt_tokens: number; reused_tokens: number; evictions: number; tier: Bytes }>;
}

/** What the stream has said so far. */
export interface State {
  connected: boolean;
  /** Since when the server has not answered, once that is worth an alert. */
  lostAt: number | null;
  memory: Memory | null;
  models: Model[] | null;
  modelsAt: number;
  requests: Requests | null;
  tasks: Task[];
  events: LogEvent[];
  refusals: Refusal[];
  timeline: Point[];
}

export interface ToolCall {
  id: string;
  name: string;
  arguments: string;
}

export interface Figures {
  first_token_s: number | null;
  tokens_per_s: number | null;
  prompt_tokens: number;
  cached_tokens: number;
  completion_tokens: number;
  loaded?: boolean;
}

export interface Message {
  role: "user" | "assistant";
  content: string;
  reasoning?: string;
  tools?: ToolCall[];
  figures?: Figures;
  finish?: string;
  error?: string;
  numbers?: Record<string, unknown> | null;
  model?: string;
}

export interface Conversation {
  id: string;
  title: string;
  model: string;
  updated: number;
  messages: Message[];
}

export interface Sampling {
  system: string;
  temperature: string;
  top_p: string;
  max_tokens: string;
  seed: string;
  tools: string;
}

/** One of the pages: `draw` gives what it shows now, `act` hears its buttons and fields. */
export interface Page {
  id: string;
  title: string;
  draw(): Node;
  act?(action: string, element: HTMLElement, event: Event): void | Promise<void>;
  /** After it was drawn: fills what is marked `data-own`. */
  settle?(root: HTMLElement): void;
  enter?(): void | Promise<void>;
  leave?(): void;
  /** What would be lost if the page were left now, as a sentence; empty if nothing. */
  unfinished?(): string;
}
