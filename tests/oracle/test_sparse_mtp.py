"""Draft logits of a sparse model's MTP layer against transformers 5.24, which has the layer but not the drafting.

The library's model is one layer longer than the target; its last layer, run by hand on whole sequences without a cache,
is the MTP layer's.  Ours drafts in the engine: in batches, padded, from the cache.
"""
import json
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file

from oracle.batch import TOLERANCE, library_model
from oracle.sparse import TOPK, deepseek, glm
from trueup.core.attention.choices import DraftReuse
from trueup.core.engine import Engine, EngineConfig
from trueup.core.sampling import SamplingParams
from trueup.models import load_model
from trueup.models.drafters import mtp_drafter

DRAFTS = 3
PROMPTS = (40, 5, 26)
# By depth: a step is fed with the one before.  The library's own fp32 is 7e-6, 1.5e-5 and 3.3e-5 off its fp64.
ALLOWED = (TOLERANCE, 2 * TOLERANCE, 4 * TOLERANCE)


class LibraryMtp:
    """The library's layers, and the four matrices around the last one that the library does not have."""

    def __init__(self, oracle):
        self.oracle, self.N = oracle, len(oracle.model.layers) - 1
        H = oracle.config.hidden_size
        norms = {name: torch.randn(H) * 0.1 + 1 for name in ("enorm", "hnorm", "shared_head.norm")}
        self.around = norms | {"eh_proj": torch.randn(H, 2 * H) * (2 * H) ** -0.5}

    def save(self, folder):
        """As a target of one layer fewer, with an MTP layer."""
        self.oracle.save_pretrained(folder)
        weights, raw = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
        weights |= {f"model.layers.{self.N}.{name}.weight": value for name, value in self.around.items()}
        save_file(weights, folder / "model.safetensors")
        kinds = {key: raw[key][: self.N] for key in ("indexer_types", "mlp_layer_types") if raw.get(key)}
        sizes = {"num_hidden_layers": self.N, "num_nextn_predict_layers": 1}
        (folder / "config.json").write_text(json.dumps(raw | kinds | sizes))
        self.oracle.config.num_hidden_layers = self.N

    def drafts(self, tokens, T, depth, policy):
        """Logits [V] of each depth, from ``tokens``: T + 1 of them certain, the rest drafted."""
        hidden, given, found = self.oracle.model(tokens[None, :T]).last_hidden_state[0], None, []  # [T, H]
        for d in range(depth):
            f, chosen = self._step(tokens[1 : T + d + 1], hidden, given)  # [H], of the last row
            hidden = torch.cat([hidden, f[None]])  # [T+d+1, H]
            found.append(self.oracle.lm_head(f))
            given = {DraftReuse.OWN: None, DraftReuse.FROZEN: chosen,
                     DraftReuse.GROWN: [T + d, *chosen][:TOPK]}[policy]
        return found

    def _step(self, tokens, hidden, given):
        """The MTP layer over a whole sequence; its last row attends to ``given``, or to its own choice."""
        model, layer, T = self.oracle.model, self.oracle.model.layers[self.N], len(tokens)
        z = torch.cat([self._norm(model.embed_tokens(tokens), "enorm"), self._norm(hidden, "hnorm")], -1)  # [T, 2H]
        z = (z @ self.around["eh_proj"].T)[None]  # [1, T, H]
        indexer, last = layer.self_attn.indexer, []
        real = indexer.forward

        def choose(*args, **kwargs):
            chosen = real(*args, **kwargs)  # [1, T, k]
            if given is not None:
                chosen[0, -1] = torch.tensor([*given, *[given[0]] * TOPK][: chosen.shape[-1]])
            last.extend(chosen[0, -1].tolist())
            return chosen

        mask = torch.ones(1, 1, T, T, dtype=torch.bool).tril()
        with patch.object(indexer, "forward", choose):
            out = layer(z, attention_mask=mask, position_embeddings=model.rotary_emb(z, torch.arange(T)[None]))
        out = out[0] if isinstance(out, tuple) else out  # [1, T, H]
        return self._norm(out[0, -1], "shared_head.norm"), list(dict.fromkeys(last))

    def _norm(self, x, name):
        eps = self.oracle.config.rms_norm_eps
        return torch.nn.functional.rms_norm(x, x.shape[-1:], self.around[name], eps)


@pytest.fixture(scope="module", params={"glm": lambda: glm(3), "deepseek": lambda: deepseek(3)}.items(),
                ids=lambda item: item[0])
def pair(request, tmp_path_factory):
    library, folder = LibraryMtp(library_model(*request.param[1]())), tmp_path_factory.mktemp("model")
    library.save(folder)
    return library, load_model(folder, dtype="float32", progress=False)


@pytest.mark.parametrize(("policy", "prefill"), [(DraftReuse.OWN, 1000), (DraftReuse.FROZEN, 9), (DraftReuse.GROWN, 9)])
@torch.no_grad()
def test_drafts_equal_the_librarys_layer_by_hand(pair, policy, prefill):
    """All depths of several rounds, of contexts shorter and longer than top-k, of each policy."""
    library, model = pair
    model.reuse = replace(model.reuse, drafts=policy)
    config = EngineConfig(num_pages=20, page_size=32, max_requests=3, prefill_tokens=prefill, buckets=(4,))
    engine = Engine(model, config, mtp_drafter(model, DRAFTS))
    seen, head = [], engine.drafter.model.logits
    engine.drafter.model.logits = lambda hidden: seen.append(head(hidden)) or seen[-1]
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(2, 512, (n,), generator=generator).tolist() for n in PROMPTS]
    text = {engine.add(p, SamplingParams(max_tokens=9, ignore_eos=True)): p for p in prompts}
    offs = []
    while engine.has_work:
        seen.clear()
        done = engine.step()
        for r, drafts in done.drafted.items():
            tokens, T = torch.tensor([*text[r], *drafts]), len(text[r]) - 1
            for depth, expected in enumerate(library.drafts(tokens, T, len(drafts), policy)):
                drawing = [q for q, drafts in done.drafted.items() if len(drafts) > depth]
                logits = seen[depth][drawing.index(r)]
                offs.append(float((logits - expected).abs().max() / expected.abs().max()) / ALLOWED[depth])
        for r, tokens in done.tokens.items():
            text[r] = [*text[r], *tokens]
    assert max(offs) <= 1
    assert len(offs) > 40


@torch.no_grad()
def test_policies_differ_from_the_second_draft_on(pair):
    tokens = torch.randint(2, 512, (33,), generator=torch.Generator().manual_seed(3))
    drafts = [pair[0].drafts(tokens, 30, DRAFTS, policy) for policy in DraftReuse]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        off = [float((a - b).abs().max() / a.abs().max()) for a, b in zip(drafts[one], drafts[other], strict=True)]
        assert off[0] == 0 and min(off[1:]) > 1000 * TOLERANCE
