# ---
# title:
#   en: "6. GLM-4.7-Flash"
#   zh: "6. GLM-4.7-Flash 全景"
# outcome:
#   en: the whole model taken apart and checked, its real config built without weights, and a small one of its shape running
#   zh: 把整个模型拆开逐一验证，不用权重就搭起真实配置的模型，并让一个同结构的小模型跑起来
# minutes: 19
# prerequisites:
#   en: "[chapter 5](ch05_mla.md) (MLA) and [chapter 4](ch04_operators.md) (contracts)"
#   zh: "[第 5 章](ch05_mla.md)（MLA）和[第 4 章](ch04_operators.md)（契约）"
# bugs: [SB-18, SB-30]
# hardware:
#   en: any laptop; the real model is built without memory for its weights; the same cells run on an NPU machine
#   zh: 任何笔记本电脑，真实模型只搭结构，不占权重内存；同样的单元格也能在 NPU 机器上运行
# ---

# %% [markdown] tags=["en"]
# **The claim.** GLM-4.7-Flash is 47 decoder layers, and one more, the MTP layer, which guesses a token further ahead
# for speculation. One config says it all: every module, every operator call, every tensor name and shape follows from
# it. So the config is completed once, before any module exists, and nobody writes to it afterwards.

# %% [markdown] tags=["zh"] pair="5730ad-a5661f"
# **要点。** GLM-4.7-Flash 是 47 个解码层，外加一个 MTP 层，它为投机解码再往前多猜一个词元。一份配置说明一切：
# 每个模块、每次算子调用、每个张量的名字和形状都由它推出。所以配置在创建任何模块之前一次补全，此后谁也不再改写它。

# %% tags=["fold"]
from IPython.display import HTML

LANES = {
    "main model": ["token p", "embed", "layer 0: MLA, dense MLP", "46 layers: MLA, experts", "norm: hidden h of p",
                   "lm_head: token p+1"],
    "MTP layer": ["token p+1", "embed, enorm: e", "eh_proj of [e, hnorm h]", "layer 47: MLA, experts",
                  "shared_head.norm", "lm_head: token p+2"],
}
parts = ['<path d="M202 192 h8 v-76 h8" fill="none" stroke="currentColor" stroke-width="3"/>']
for lane, (name, steps) in enumerate(LANES.items()):
    x = 2 + lane * 216
    parts.append(f'<text x="{x + 100}" y="16" text-anchor="middle" font-weight="bold">{name}</text>')
    for i, step in enumerate(steps):
        y = 26 + i * 38
        parts.append(f'<rect x="{x}" y="{y}" width="200" height="28" rx="3" fill-opacity="0.08" stroke="currentColor"/>'
                     f'<text x="{x + 100}" y="{y + 18}" text-anchor="middle">{step}</text>')
        parts.append(f'<path d="M{x + 100} {y + 28}v10" stroke="currentColor"/>' if i < 5 else "")
caption = ('<span lang="en">The MTP layer takes the hidden row of p (thick line) and the token after it.</span>'
           '<span lang="zh">MTP 层接收位置 p 的隐藏状态（粗线）和它后面的那个词元。</span>')
HTML(f'<figure class="trueup-picture"><svg viewBox="0 0 420 256" width="420" style="max-width:100%;height:auto" '
     f'role="img" aria-label="GLM-4.7-Flash, MTP" fill="currentColor" font-family="monospace" font-size="13">'
     f'<title>GLM-4.7-Flash, MTP</title>{"".join(parts)}</svg><figcaption>{caption}</figcaption></figure>')

# %% [markdown] tags=["en"]
# ## The config
#
# These are the published values (Hugging Face, `zai-org/GLM-4.7-Flash`, `config.json`), less some keys that change
# nothing here.

# %% [markdown] tags=["zh"] pair="ac6661-02974d"
# ## 配置
#
# 下面是公开发布的数值（Hugging Face，`zai-org/GLM-4.7-Flash`，`config.json`），略去了几个在这里没有作用的键。

# %%
REAL = {
    "model_type": "glm4_moe_lite", "dtype": "bfloat16", "vocab_size": 154880,
    "hidden_size": 2048, "num_hidden_layers": 47, "num_nextn_predict_layers": 1,
    "max_position_embeddings": 202752, "rms_norm_eps": 1e-05,
    # attention
    "num_attention_heads": 20, "q_lora_rank": 768, "kv_lora_rank": 512,
    "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256,
    "rope_theta": 1000000, "rope_scaling": None, "attention_bias": False,
    # MLP and experts
    "intermediate_size": 10240, "first_k_dense_replace": 1, "hidden_act": "silu",
    "moe_intermediate_size": 1536, "n_routed_experts": 64, "n_shared_experts": 1,
    "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
    "routed_scaling_factor": 1.8, "topk_method": "noaux_tc",
    # tokens
    "eos_token_id": [154820, 154827, 154829], "pad_token_id": 154820,
    "tie_word_embeddings": False,
}
# Code that reads these two must supply them:
assert "scoring_func" not in REAL and "moe_layer_freq" not in REAL

# %% [markdown] tags=["en"]
# ## The wrong way: completing the config in a constructor (SB-30)
#
# In some engines, layer code reads a key `moe_layer_freq` to decide whether a layer has experts. The file lacks it, so
# the full model's constructor sets it. The draft model (the MTP layer, run as a model of its own) uses the same layer
# class, but not that constructor. A small version:

# %% [markdown] tags=["zh"] pair="125734-612db8"
# ## 错误的做法：在构造函数里补全配置（SB-30）
#
# 有些引擎的层代码靠 `moe_layer_freq` 这个键判断某层有没有专家。配置文件里没有这个键，于是完整模型的构造函数补上它。
# 草稿模型（把 MTP 层当作单独的模型来运行）用同一个层类，却不经过那个构造函数。最小的复现如下：

# %%
from types import SimpleNamespace


class Layer:
    def __init__(self, config, index):
        dense = index < config.first_k_dense_replace
        self.experts = not dense and index % config.moe_layer_freq == 0


class Target:
    def __init__(self, config):
        config.moe_layer_freq = 1  # completed here
        self.layers = [Layer(config, i) for i in range(config.num_hidden_layers)]


class Draft:
    def __init__(self, config):
        self.layer = Layer(config, config.num_hidden_layers)


shared = SimpleNamespace(**REAL)
Target(shared)
assert Draft(shared).layer.experts  # after a target, a draft works

# %% tags=["raises-exception"] raises="AttributeError" says="moe_layer_freq"
Draft(SimpleNamespace(**REAL))  # alone, it does not

# %% [markdown] tags=["en"]
# This happened when MTP came to GLM-4.7-Flash in sglang (PR #28516). The repair there sets the key inside the layer's
# constructor (`python/sglang/srt/models/glm4_moe_lite.py`). That works. But now building a module changes an object
# that others hold:

# %% [markdown] tags=["zh"] pair="8f5080-5b2d0f"
# sglang 为 GLM-4.7-Flash 加入 MTP 时就遇到了它（PR #28516）。那里的修法是在层的构造函数里设置这个键，
# 见 `python/sglang/srt/models/glm4_moe_lite.py`。这样能用，但构造一个模块从此会改动别人手里的对象：

# %%
class RepairedLayer(Layer):
    def __init__(self, config, index):
        config.moe_layer_freq = 1
        super().__init__(config, index)


config, before = SimpleNamespace(**REAL), SimpleNamespace(**REAL)
RepairedLayer(config, 47)
assert config != before

# %% [markdown] tags=["en"]
# ## The right way: normalise once, then freeze
#
# `ModelConfig.from_hf` settles every value: absent keys, old and new names of a key (`torch_dtype` and `dtype`),
# experts or not for each layer, the MTP layer included. A missing size is an error, because with a library's default it
# would be another model.

# %% [markdown] tags=["zh"] pair="c496d9-631d30"
# ## 正确的做法：规范化一次，然后冻结
#
# `ModelConfig.from_hf` 把每个值都定下来：缺失的键、同一个键的新旧两种名字（`torch_dtype` 和 `dtype`）、
# 每层有没有专家（MTP 层也算）。缺了某个尺寸就报错，因为用库的默认值顶替，就成了另一个模型。

# %%
import dataclasses

import torch
from trueup.models.config import ModelConfig
from trueup.models.glm4_moe_lite import Glm4MoeLite, MtpLayer

real = ModelConfig.from_hf(REAL)
before = dataclasses.asdict(real)
with torch.device("meta"):  # shapes without memory
    alone = MtpLayer(real, real.num_hidden_layers)
    target = Glm4MoeLite(real)
    after = MtpLayer(real, real.num_hidden_layers)

assert dataclasses.asdict(real) == before  # building changed nothing
for layer in (alone, after, target.mtp[0]):
    assert type(layer.decoder.mlp).__name__ == "MoE"
assert real.scoring_func == "sigmoid" and real.moe_layers == (False,) + (True,) * 47

# %% tags=["raises-exception"] raises="FrozenInstanceError" says="scoring_func"
real.scoring_func = "softmax"

# %% [markdown] tags=["en"]
# ## The router
#
# Each mixture-of-experts (MoE) layer has E = 64 experts, and sends a token to K = 4 of them (8 and 2 in the cells
# below). With $x$ a row of width H, gate $W$ and a *correction bias* $b$, both learned:
#
# $$s = \mathrm{sigmoid}(W x), \qquad \mathrm{chosen} = \mathrm{topk}(s + b)$$
#
# $$w = 1.8 \cdot \frac{s_{chosen}}{\sum s_{chosen}}$$
#
# The bias keeps the experts evenly busy. It takes part in the choice and in nothing else. (`n_group` is 1 in the
# config: there is one group, so the choice is among all experts.)

# %% [markdown] tags=["zh"] pair="300686-3ffc84"
# ## 路由器
#
# 每个混合专家（MoE）层有 E = 64 个专家，把一个词元送到其中 K = 4 个（下面的单元格里是 8 和 2）。设 $x$ 是宽 H 的一行，$W$ 是门控权重，
# $b$ 是*校正偏置*，两者都由训练得到：
#
# $$s = \mathrm{sigmoid}(W x), \qquad \mathrm{chosen} = \mathrm{topk}(s + b)$$
#
# $$w = 1.8 \cdot \frac{s_{chosen}}{\sum s_{chosen}}$$
#
# 1.8 就是配置里的 `routed_scaling_factor`。偏置使各个专家的负载保持均衡；它只参与选择，不进入权重。
# （配置里 `n_group` 为 1：只有一组，所以是在全部专家中选。）

# %%
def router(x, gate, bias, K, scaling):
    score = (x.float() @ gate.T).sigmoid()  # [T, E]: fp32, rounding would reroute
    chosen = (score + bias).topk(K).indices  # [T, K]: the bias is in the choice ...
    weights = score.gather(1, chosen)  # [T, K]: ... and not in the weights
    weights = weights / weights.sum(-1, keepdim=True)  # [T, K]: first normalise,
    return scaling * weights, chosen  # [T, K], [T, K]: then scale


# %%
import trueup.core
from torch.testing import assert_close
from trueup.core.layers.mlp import MoE, Routing

npu = trueup.core.load().name == "device"
device, dtype = ("npu", torch.bfloat16) if npu else ("cpu", torch.float32)
tol = 3e-2 if npu else 1e-5
T, H, E, K = 5, 8, 8, 2  # token rows, hidden width, experts, experts a token
inner = 6  # I: width inside an expert

torch.manual_seed(3)
routing = Routing(experts=E, top_k=K, groups=1, top_groups=1, scaling=1.8)
moe = MoE(H, inner, inner, routing).requires_grad_(False)
for name, parameter in moe.named_parameters():
    kept = torch.float32 if name in ("gate", "bias") else dtype
    parameter.data = torch.randn_like(parameter).to(device, kept)
moe.bias *= 0.5
x = torch.randn(T, H).to(device, dtype)  # [T, H]
assert moe.gate.shape == (E, H) and moe.gate_up.shape == (E, H, 2 * inner)

# %%
weights, experts = moe.route(x)  # [T, K], [T, K]: npu_moe_gating_top_k
expected, chosen = router(x, moe.gate, moe.bias, K, 1.8)  # [T, K], [T, K]
assert torch.equal(experts.long(), chosen)
assert_close(weights, expected, atol=tol, rtol=tol)

# %% [markdown] tags=["en"]
# Two mistakes are easy, and neither raises an error: weights taken with the bias, and scaling before
# normalising, which divides the 1.8 away. A fresh model has zero biases, and these hide the first one.

# %% [markdown] tags=["zh"] pair="28467d-845de9"
# 有两个错误很容易犯，而且都不会报错：权重里带上偏置；先缩放后归一化，1.8 就被约掉了。
# 刚初始化的模型偏置全为零，第一个错误正好被掩盖。

# %%
score = (x.float() @ moe.gate.T).sigmoid()  # [T, E]


def normalised(weights):
    return weights / weights.sum(-1, keepdim=True)  # [T, K]


with_bias = 1.8 * normalised((score + moe.bias).gather(1, chosen))  # [T, K]
assert (with_bias - expected).abs().max() > 0.1
scaled_first = normalised(1.8 * score.gather(1, chosen))  # [T, K]
assert (scaled_first.sum(-1) - 1).abs().max() < 1e-5  # and should be 1.8
assert not torch.equal(chosen, score.topk(K).indices)  # here the bias matters

# %% [markdown] tags=["en"]
# ## The experts: sort, multiply, bring back
#
# Three operators. `npu_moe_init_routing_v2` copies each token row once for each of its experts, and sorts the copies
# by expert. We choose experts for three tokens by hand, and let row t of x hold the number t, so that rows can be
# recognised.

# %% [markdown] tags=["zh"] pair="062f3c-461f6f"
# ## 专家：排序、相乘、送回
#
# 一共三个算子。`npu_moe_init_routing_v2` 把每个词元行复制 K 份，它选中的专家各得一份，再把全部副本按专家排序。
# 我们手工给三个词元指定专家，并让 x 的第 t 行全是数字 t，这样一眼能认出每一行。

# %%
number = torch.arange(3.0).to(device, dtype)  # [T]
ids = torch.tensor([[2, 0], [2, 1], [0, 3]], dtype=torch.int32).to(device)  # [T, K]
rows, row_of, counts, _ = torch.ops.npu.npu_moe_init_routing_v2(
    number[:, None].repeat(1, H), ids, active_num=6,
    expert_num=4, active_expert_range=[0, 4],
    expert_tokens_num_type=1, expert_tokens_num_flag=True, row_idx_type=0)

# [T*K, H]: tokens 0 and 2 for expert 0, 1 for expert 1, 0 and 1 for expert 2, ...
assert rows.shape == (6, H) and rows[:, 0].tolist() == [0, 2, 1, 0, 1, 2]
# [E]: rows of each expert
assert counts.tolist() == [2, 1, 2, 1]
# [T*K]: entry t*K + j is the row of token t's choice j
assert row_of.tolist() == [3, 0, 4, 2, 1, 5]

# %% tags=["fold"]
from trueup.core.picture import boxes

pairs = [(t, e) for t, chosen_two in enumerate(ids.tolist()) for e in chosen_two]
boxes([("t → expert", [f"{t} → {e}" for t, e in pairs]), ("row_of", [str(r) for r in row_of.tolist()]),
       ("rows", [f"{t} → {e}" for e, t in sorted((e, t) for t, e in pairs)])],
      ("Pairs in token order, the row each goes to, and the rows by expert.",
       "按词元顺序的配对、各自去的行，以及按专家排好的行。"))

# %% [markdown] tags=["en"]
# `npu_grouped_matmul` multiplies each expert's rows by that expert's matrix. `group_list_type` says what the list
# holds: 1 for counts, 0 for running sums. Counts handed over as running sums are caught where they fall:

# %% [markdown] tags=["zh"] pair="59a75b-8d2523"
# `npu_grouped_matmul` 用每个专家自己的矩阵去乘属于它的行。`group_list_type` 说明列表里是什么：1 是计数，0 是累计和。
# 误把计数当成累计和传进去时，只要数列中有下降，契约就会拒绝：

# %%
grouped = torch.ops.npu.npu_grouped_matmul
up = torch.randn(4, H, inner).to(device, dtype)  # [E, H, I]
assert len(up) == len(counts)  # a matrix and a count for each expert

# %% tags=["raises-exception"] raises="ContractError" says="group_list"
grouped([rows], [up], group_list=counts, split_item=2, group_type=0,
        group_list_type=0)

# %%
(answers,) = grouped([rows], [up], group_list=counts, split_item=2, group_type=0,
                     group_list_type=1)  # [T*K, I]
parts = zip(rows.split(counts.tolist()), up, strict=True)
one_by_one = torch.cat([part @ matrix for part, matrix in parts])  # [T*K, I]
assert_close(answers, one_by_one, atol=tol, rtol=tol)

# %% [markdown] tags=["en"]
# `npu_moe_finalize_routing` brings the answers back: for each token, the weighted sum of its K rows, plus `skip1`,
# where we pass the answer, unscaled, of the shared expert (one that every token goes to). `drop_pad_mode` must fit the
# order of `row_of`: 2 for entry t*K + j. No check can see a wrong one; it mixes up tokens.

# %% [markdown] tags=["zh"] pair="1beccd-60e255"
# `npu_moe_finalize_routing` 把结果送回去：每个词元是它那 K 行的加权和，再加上 `skip1`，我们在这里传入共享专家（每个词元都经过的专家）的输出，不缩放。
# `drop_pad_mode` 必须与 `row_of` 的顺序一致：条目为 t*K + j 时用 2。传错了没有哪项检查能发现，结果会在词元之间串位。

# %%
w = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.7, 0.3]]).to(device, dtype)  # [T, K]
shared = torch.randn(3, inner).to(device, dtype)  # [T, I]


def brought_back(mode):
    return torch.ops.npu.npu_moe_finalize_routing(
        answers, shared, None, None, w, row_of, None, drop_pad_mode=mode)  # [T, I]


index = row_of.view(3, K).long()  # [T, K]
by_hand = shared + (w[..., None] * answers[index]).sum(1)  # [T, I]
assert_close(brought_back(2), by_hand, atol=tol, rtol=tol)
assert not torch.allclose(brought_back(0), by_hand, atol=tol, rtol=tol)

# %% [markdown] tags=["en"]
# Put together, with a SwiGLU between two products, that is the whole layer. A plain loop agrees, and the ledger shows
# the calls. In it S counts the T*K sorted rows, and Dout is the width that a product ends in.

# %% [markdown] tags=["zh"] pair="f3bc82-6576e7"
# 合起来，两次相乘之间夹一个 SwiGLU（带门控的激活），就是整个层。朴素的循环与它结果一致，账本则列出各次调用。
# 其中 S 是排好序的 T*K 行，Dout 是一次相乘之后的宽度。

# %%
from torch.nn.functional import silu
from trueup.core import ledger

with ledger.record(moe) as led:
    got = moe(x)  # [T, H]

loop = moe.shared(x)  # [T, H]
for t in range(T):
    for weight, e in zip(expected[t], chosen[t], strict=True):
        gate, up_row = (x[t] @ moe.gate_up[e]).chunk(2)  # [I], [I]
        loop[t] += weight * ((silu(gate) * up_row) @ moe.down[e])
assert_close(got, loop, atol=10 * tol, rtol=tol)
led

# %% [markdown] tags=["en"]
# The *shared expert* sees every token. Layer 0 has no router at all: a *dense* MLP, wider than an expert, does all of
# its work. Everything else is alike. Where do the parameters sit? The real model, on the meta device, answers:

# %% [markdown] tags=["zh"] pair="8d9907-b9151c"
# *共享专家*处理每一个词元。第 0 层根本没有路由器，全部工作由一个比单个专家更宽的*稠密* MLP 完成，其余都一样。
# 参数都在哪里？meta 设备上的真实模型可以回答：

# %%
def size(module):
    return sum(parameter.numel() for parameter in module.parameters())


main = size(target) - size(target.mtp)
moe_layers = [layer.mlp for layer in target.layers if isinstance(layer.mlp, MoE)]
routed = sum(mlp.gate_up.numel() + mlp.down.numel() for mlp in moe_layers)
assert len(moe_layers) == 46 and not isinstance(target.layers[0].mlp, MoE)
assert main == 29_943_393_920
assert 0.92 < routed / main < 0.93  # nine tenths of the model are routed experts

# %% [markdown] tags=["en"]
# ## The MTP layer
#
# MTP (multi-token prediction) is a decoder layer with a front of its own. For position p it takes $h_p$, the main
# model's hidden row after the final norm, and the *next* token. A projection joins the two; then come decoder layer
# 47, a norm, and the main model's own `lm_head`, which predicts token p + 2:
#
# $$z_p = W_{eh}\,[\,\mathrm{enorm}(\mathrm{embed}(t_{p+1}));\ \mathrm{hnorm}(h_p)\,]$$
#
# The embedding comes **first**. The other order fits in shape, and gives a drafter that loads and guesses noise: that
# is half of [SB-18](../bugs.md#sb-18) (the other half: $h_p$ taken on the wrong side of the final norm). `enorm` and
# `hnorm` are RMS norms. On paper: width 4, the projection $[\,I \mid 2I\,]$, an embedding of ones, a hidden row of
# tens.

# %% [markdown] tags=["zh"] pair="0be3b0-057335"
# ## MTP 层
#
# MTP（多词元预测）是一个解码层，前面多一段自己的输入处理。在位置 p，它接收 $h_p$，即主模型最终归一化之后的隐藏状态，
# 以及*下一个*词元。一个投影把两者合起来，然后依次是编号 47 的解码层（主模型的 47 层编号为 0 到 46）、
# 一次归一化和主模型自己的 `lm_head`，预测位置 p + 2 的词元：
#
# $$z_p = W_{eh}\,[\,\mathrm{enorm}(\mathrm{embed}(t_{p+1}));\ \mathrm{hnorm}(h_p)\,]$$
#
# `enorm` 和 `hnorm` 是两个 RMS 归一化，$W_{eh}$ 在检查点里叫 `eh_proj`。
# 嵌入在**前**。换个顺序形状也对，草稿模型照样能加载，猜出来的却全不着边：这是 [SB-18](../bugs.md#sb-18) 的一半（另一半是 $h_p$ 取自最终归一化之前还是之后，弄反了）。
# 用纸笔就能验证：宽度取 4，投影取 $[\,I \mid 2I\,]$，嵌入全为 1，隐藏状态全为 10。

# %%
projection = torch.cat([torch.eye(4), 2 * torch.eye(4)], 1)  # [H, 2H]
embedding, hidden = torch.ones(4), torch.full((4,), 10.0)  # [H], [H]
assert (projection @ torch.cat([embedding, hidden]) == 21).all()
assert (projection @ torch.cat([hidden, embedding]) == 12).all()

# %% [markdown] tags=["en"]
# The nano model has a trained MTP layer, so the mistake can be measured. We run a piece of Python through the model and
# the MTP layer, and ask how often the MTP layer's guess for token p + 2 equals the main model's own guess. Then the two
# halves of `eh_proj` change places.

# %% [markdown] tags=["zh"] pair="c0f247-253dba"
# nano 模型带有训练过的 MTP 层，所以这个错误的影响可以测出来。我们把一段 Python 代码送进主模型和 MTP 层，
# 统计 MTP 层对位置 p + 2 的词元的猜测有多少次与主模型自己的猜测相同。然后把 `eh_proj` 的两半对调。

# %%
from trueup.core.cache import Pools
from trueup.core.layout import Mode
from trueup.core.pages import PagePool
from trueup.core.planning import Work, plan
from trueup.core.view import materialise
from trueup.models import LLM

llm = LLM.from_pretrained("glm-4.7-flash-nano", progress=False)
nano = llm.model
assert nano.config.num_hidden_layers == 3 and len(nano.mtp) == 1

# %%
@torch.inference_mode()
def guesses(tokens):
    """At every p but the last: the model's guess of token p + 1, MTP's of p + 2."""
    pool = PagePool(4, 128)
    pools = Pools(nano.cache_spec, pool)
    pages = pool.allocate(pool.pages_for(len(tokens)))
    work = Work(0, Mode.PREFILL, start=0, length=len(tokens) - 1, pages=pages)
    view = materialise(plan([work], page_size=128), pools)
    ids = torch.tensor(tokens, device=pools.spec.device)  # [T+1]
    hidden = nano.forward(ids[:-1], view, pools)  # [T, H]
    # Row p pairs token p + 1 with the hidden row of p.
    drafted = nano.forward_mtp(ids[1:], hidden, view, pools)  # [T, H]
    return nano.logits(hidden).argmax(-1), nano.logits(drafted).argmax(-1)  # [T], [T]


# %%
TEXT = """import os

class Stack:
    def __init__(self, items=None):
        self.items = list(items or [])

    def push(self, item):
        self.items.append(item)

    def pop(self):
        if not self.items:
            raise IndexError("pop from an empty stack")
        return self.items.pop()
"""


def agreement():
    own, drafted = guesses(llm.tokenizer.encode(TEXT))  # [T], [T]
    return (drafted[:-1] == own[1:]).float().mean().item()


# %%
right = agreement()
eh, H_nano = nano.mtp[0].eh, nano.config.hidden_size  # [H, 2H]
eh.copy_(eh.roll(H_nano, dims=1))  # hidden first
swapped = agreement()
eh.copy_(eh.roll(H_nano, dims=1))  # put back
print(f"embedding first: {right:.0%}, hidden first: {swapped:.0%}")
assert right > 0.4 and swapped < 0.1 and agreement() == right

# %% [markdown] tags=["en"]
# A guess counts only once the main model has verified it, so the text would be right in both cases. Only the speed
# tells. That is why the order is pinned by a test.
#
# ## Reading a checkpoint
#
# A checkpoint is names, shapes, numbers. The first two follow from the config, before any file is opened:
# `expected_tensors` lists them, and the loader compares the files' headers with that list before it copies anything.
# Each of the 48 layers has 7 attention tensors and 2 norms. A dense MLP has 3 tensors; an MoE layer has 3 for each
# expert, the shared one included, and 2 in its router. The MTP layer has 6 of its own, and the top of the model has
# embedding, norm and `lm_head`.

# %% [markdown] tags=["zh"] pair="d7c4f2-d8baf1"
# 猜测要经过主模型验证才算数，所以两种情况下文本都是对的，只有速度不同。正因如此，要用测试把顺序固定下来。
#
# ## 读检查点
#
# 检查点就是名字、形状和数字。前两样在打开任何文件之前就能由配置推出：`expected_tensors` 把它们列出来，
# 加载器先拿文件头与这张清单比对，然后才开始复制。48 层中每层有 7 个注意力张量和 2 个归一化张量；
# 稠密 MLP 有 3 个；MoE 层每个专家 3 个（共享专家也算），路由器 2 个；MTP 层另有 6 个；最外层还有嵌入、归一化和 `lm_head`，共 3 个。

# %%
from trueup.models.checkpoint import expected_tensors

names = expected_tensors(real)
kv_b = names["model.layers.1.self_attn.kv_b_proj.weight"]
assert kv_b.shape == (20 * (192 + 256), 512)  # [N*(Dn+Dv), R]
assert names["model.layers.1.mlp.experts.63.down_proj.weight"].shape == (2048, 1536)
assert names["model.layers.47.eh_proj.weight"].shape == (2048, 2 * 2048)

attention, dense, experts = 48 * 9, 3, 47 * (64 * 3 + 2 + 3)  # with two norms a layer
mtp_own, top = 6, 3
assert len(names) == attention + dense + experts + mtp_own + top == 9_703
assert sum(tensor.numel for tensor in names.values()) == 31_221_488_576

# %% [markdown] tags=["en"]
# What if config and files disagree? We give the nano checkpoint a config with a ninth expert.

# %% [markdown] tags=["zh"] pair="e0bf56-cb31ac"
# 配置与文件对不上会怎样？我们给 nano 检查点一份多出第九个专家的配置。

# %% tags=["raises-exception"] raises="ValueError" says="missing"
import json
import tempfile
from pathlib import Path
from trueup.models import load_model, zoo

with tempfile.TemporaryDirectory() as folder:
    source = zoo.path("glm-4.7-flash-nano")
    raw = json.loads((source / "config.json").read_text())
    Path(folder, "config.json").write_text(json.dumps(raw | {"n_routed_experts": 9}))
    Path(folder, "model.safetensors").symlink_to(source / "model.safetensors")
    load_model(folder, progress=False)

# %% [markdown] tags=["en"]
# ## What engines do
#
# - sglang shares one layer class between model and draft, and scales the sum of the experts afterwards instead of the
#   weights: the same numbers (`python/sglang/srt/models/glm4_moe_lite.py`).
# - vllm-ascend sorts with `npu_moe_init_routing_v2`, too. With experts spread over ranks, `group_list` adds up to fewer
#   rows than there are, and the rest of the result is unwritten (`vllm_ascend/ops/fused_moe/token_dispatcher.py`).
# - transformers keeps experts fused, `[E, 2I, H]`; published files have one tensor per expert. Our loader reads both.
#
# ## Your turn: load it, run it
#
# The nano checkpoint is loaded already, as `llm`. Let it write, and check its first token by hand. (`guesses` sets the
# last token apart, so we append a 0 in its place.)

# %% [markdown] tags=["zh"] pair="c9576b-4230b4"
# ## 真实引擎怎么做
#
# - sglang 的主模型和草稿模型共用一个层类；缩放不放在权重上，而是乘在专家之和上，结果相同，
#   见 `python/sglang/srt/models/glm4_moe_lite.py`。
# - vllm-ascend 也用 `npu_moe_init_routing_v2` 排序。专家分布在多张卡上时，`group_list` 加起来比行数少，
#   结果的其余部分不会被写入（`vllm_ascend/ops/fused_moe/token_dispatcher.py`）。
# - transformers 在内存里把专家合成 `[E, 2I, H]`；发布的文件每个专家一个张量。我们的加载器两种都能读。
#
# ## 轮到你：加载，运行
#
# nano 检查点已经加载好了，就是 `llm`。让它写一段，并手工核对它的第一个词元。
# （`guesses` 不把最后一个词元送进主模型，所以我们在末尾补一个 0 占这个位置。）

# %%
from trueup.core.sampling import SamplingParams

prompt = "def read_lines(path):\n    with open("
completion = llm.generate(prompt, SamplingParams(max_tokens=24))[0]
print(prompt + completion.text)

own, _ = guesses([*llm.tokenizer.encode(prompt), 0])  # 0: what comes next
assert completion.token_ids[0] == own[-1]

# %% [markdown] tags=["en"]
# And the real one? It is `target`, built above on the meta device: all of it is there except the numbers. With
# a folder of the published files, `LLM.from_pretrained(folder)` is the same call; it needs about 60 GB of memory in
# bf16.

# %% [markdown] tags=["zh"] pair="25df92-508db2"
# 真实的模型呢？就是上面在 meta 设备上搭好的 `target`，除了权重数值什么都有。手头有官方发布的权重文件夹时，
# `LLM.from_pretrained(folder)` 还是同一个调用；bf16 大约需要 60 GB 内存。

# %%
# The files repeat embed and lm_head for the MTP layer.
copies = 2 * real.vocab_size * real.hidden_size
assert main == 29_943_393_920
assert main + size(target.mtp) + copies == 31_221_488_576
assert {parameter.device.type for parameter in target.parameters()} == {"meta"}

# %% [markdown] tags=["en"]
# ## Exercises
#
# **1.** How many parameters of the main model take part in computing one token?

# %% [markdown] tags=["zh"] pair="a4c257-e661de"
# ## 练习
#
# **1.** 算一个词元，主模型有多少参数参与？

# %% tags=["solution"]
idle = 46 * (64 - 4) * 3 * 2048 * 1536  # experts that the token does not go to
assert main - idle == 3_896_766_080  # 3.9 of 29.9 billion

# %% [markdown] tags=["en"]
# **2.** Call `npu_grouped_matmul` above with `group_list_type=0` and a list that makes it right.

# %% [markdown] tags=["zh"] pair="2f4698-f39551"
# **2.** 用 `group_list_type=0` 调用上面的 `npu_grouped_matmul`，并给出与之相符的列表。

# %% tags=["solution"]
(summed,) = grouped([rows], [up], group_list=counts.cumsum(0), split_item=2,
                    group_type=0, group_list_type=0)  # [T*K, I]
assert torch.equal(summed, answers)

# %% [markdown] tags=["en"]
# **3.** How many bytes does the real model's cache need for one request at its position limit, in bf16?

# %% [markdown] tags=["zh"] pair="6d49b9-2508c7"
# **3.** 真实模型的一个请求达到位置上限时，bf16 缓存需要多少字节？

# %% tags=["solution"]
a_token = (47 + 1) * (512 + 64) * 2  # MTP's layer, too; latent and rope key
assert a_token == 55_296
assert a_token * real.max_position_embeddings == 11_211_374_592  # about 11 GB

# %% [markdown] tags=["en"]
# ## On an NPU machine
#
# Run all cells. The small layer and the nano model are then in bf16 on the device; all sizes here are, by their
# documents, ones that its kernels accept. The call that our contract refuses reaches the device unchecked: it may stop
# with an error of its own or return wrong rows. No device has run this chapter yet: see [what ran
# where](../what-ran-where.md).

# %% [markdown] tags=["zh"] pair="7ea8fb-fda98c"
# ## 在 NPU 机器上
#
# 运行全部单元格即可。那时小 MoE 层和 nano 模型以 bf16 在设备上运行；按文档，这里的尺寸都是内核接受的。
# 被契约拒绝的那个调用，这时不经检查就到了设备：可能报出设备自己的错误，也可能返回错误的行。
# 本章还没有在任何设备上运行过，参见[哪些在哪里跑过](../what-ran-where.md)。
