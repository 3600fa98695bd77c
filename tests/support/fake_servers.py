"""Servers around pairings, in this process, that answer and count as vLLM, SGLang or llama.cpp."""

import contextlib
import json
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice

NAMES = {"vllm": "vllm:spec_decode_num_{}_total{{engine=\"0\"{}}} {}",
         "llamacpp": "llamacpp:spec_decode_num_{}_total{{{}}} {}"}  # fmt: skip


PATHS = {"vllm": "/v1/completions", "sglang": "/generate", "llamacpp": "/completion"}


class Fake(BaseHTTPRequestHandler):
    """A server of any kind around a pairing. `fault` changes what one round reports or emits."""

    def do_GET(self):
        engine = self.server.fake
        if self.path == "/v1/models":
            card = {"id": "target-10m", "owned_by": engine["kind"]}
            return self.say(engine.get("models", json.dumps({"data": [card]})))
        lines = ["# HELP vllm:spec_decode_num_drafts_total Number of drafts", "other:x_total 1"]
        for name, count in engine["counts"].items():
            at = f'{"," * (engine["kind"] == "vllm")}position="{name[-1]}"' * name[-1].isdigit()
            name = name.rstrip("0123456789_")
            lines.append(NAMES[engine["kind"]].format(name, at, float(count)))
        lines += [f"{engine['kind']}:spec_decode_num_drafts_created 1.7e9", f"{engine['kind']}:x 1"]
        return self.say("\n".join(lines))

    def do_POST(self):
        body, engine = (
            json.loads(self.rfile.read(int(self.headers["Content-Length"]))),
            self.server.fake,
        )
        kind = engine["kind"]
        assert self.path == PATHS[kind]
        asked = body["sampling_params"] if kind == "sglang" else body
        assert asked["temperature"] == 0
        if engine.get("refuses"):
            self.send_response(400)
            self.end_headers()
            self.wfile.write(b'{"error": "prompt too\n long"}')
            return
        prompt = body["input_ids" if kind == "sglang" else "prompt"]
        names = {"vllm": "max_tokens", "sglang": "max_new_tokens", "llamacpp": "n_predict"}
        with self.server.serving_one:
            self.answer(engine, kind, prompt, asked[names[kind]])

    def answer(self, engine, kind, prompt, limit):
        decoder, steps = engine["pairing"].engine, []
        [answer] = decoder.generate([prompt], 1).tokens  # a pass over the prompt drafts nothing
        if limit > 1 and answer[0] not in decoder.eos:
            out = decoder.generate([prompt + answer], limit - 1)
            answer, steps = answer + out.tokens[0], out.trace.steps()
        tokens = iter(answer)
        events = [list(islice(tokens, n)) for n in (1, *(step.emitted for step in steps))]
        if engine.get("spoils"):
            events[-1] = [events[-1][0] + 1, *events[-1][1:]]
        if engine.get("joins"):
            events[:2] = [events[0] + events[1]]
        if engine.get("hides_eos"):
            events = [[t for t in new if t not in decoder.eos] for new in events]
        ended = answer[-1] in decoder.eos
        for step in steps:
            accepted = min(step.accepted, engine.get("most", 99))
            if step.drafted:
                engine["counts"] += Counter(drafts=1, draft_tokens=step.drafted)
                engine["counts"]["accepted_tokens"] += accepted
                for at in range(accepted if engine.get("by_place", True) else 0):
                    engine["counts"][f"accepted_tokens_per_pos_{at}"] += 1
        engine["counts"].update(engine.get("others", {}))
        reason = "stop" if ended else "length"
        if kind == "sglang":
            parts = self.events_of_sglang(events, steps, reason)
        else:
            key = "token_ids" if kind == "vllm" else "tokens"
            parts = [{key: new} for new in events]
            stop_type = "eos" if ended else "limit"
            parts.append({key: [], "finish_reason": reason, "stop_type": stop_type, "stop": True})
            parts = [{"choices": [part]} for part in parts] if kind == "vllm" else parts
        parts += engine.get("adds", [])
        lines = [f"data: {json.dumps(part)}\n\n" for part in parts[: engine.get("parts")]]
        self.say("".join(lines) + engine.get("ends", "data: [DONE]\n\n"))

    def events_of_sglang(self, events, steps, reason):
        """As its version 0.5.23: tokens so far, or new ones; an event on its way may hold tokens
        that it does not count yet; counts come at the end."""
        engine = self.server.fake
        every, parts = [token for new in events for token in new], []
        for number, new in enumerate(events, 1):
            total = sum(map(len, events[:number]))
            tokens = new if engine.get("incremental") else every[: total + 1]
            about = {"completion_tokens": total, "finish_reason": None}
            parts.append({"output_ids": tokens, "meta_info": about})
        drafts = engine["pairing"].options["drafter"] != "plain"
        if drafts and (accepted := [step.accepted for step in steps]):
            gamma = engine["pairing"].gamma
            about |= {
                "spec_verify_ct": len(accepted), "spec_num_proposed_drafts": gamma * len(accepted),
                "spec_num_correct_drafts": sum(accepted),
                "spec_correct_drafts_histogram": [accepted.count(n) for n in range(gamma + 1)],
            }  # fmt: skip
            if engine.get("counts_on_its_way"):
                parts[0]["meta_info"] |= {n: about[n] for n in about if n.startswith("spec_")}
        about["finish_reason"] = engine.get("reason", {"type": reason})
        return parts

    def say(self, text):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args):
        pass


@contextlib.contextmanager
def starting():
    """start(pairing, kind="vllm", **fault) starts a server and returns its address."""
    running = []

    def start(pairing, kind="vllm", handler=Fake, **fault):
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        server.fake = {"pairing": pairing, "kind": kind, "counts": Counter(), **fault}
        server.serving_one = threading.Lock()  # a pairing has one cache
        threading.Thread(target=server.serve_forever, daemon=True).start()
        running.append(server)
        return f"127.0.0.1:{server.server_port}"

    try:
        yield start
    finally:
        for server in running:
            server.shutdown()
            server.server_close()
