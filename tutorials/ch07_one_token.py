# ---
# title:
#   en: "7. One token through a step"
#   zh: "7. 一个词元走完一步"
# outcome:
#   en: the place of one token in every tensor of a decode step, and a way to ask for it in any step of your own
#   zh: 知道解码一步里一个词元在每个张量中的位置，并且会在自己的任何一步里查出它
# minutes: 9
# prerequisites:
#   en: "[chapter 3](ch03_cache.md) (pages and slots), [chapter 5](ch05_mla.md) (MLA), [chapter 6](ch06_glm.md) (experts)"
#   zh: "[第 3 章](ch03_cache.md)（页与槽位）、[第 5 章](ch05_mla.md)（MLA）、[第 6 章](ch06_glm.md)（专家）"
# bugs: []
# hardware:
#   en: any laptop; the same cells run on an NPU machine
#   zh: 任何笔记本电脑；同样的单元格也能在 NPU 机器上运行
# ---

# %% [markdown] tags=["en"]
# **The claim.** Inside a step, a token is only an index, and the index changes from tensor to tensor: a row of the
# batch, a page and a row in the cache, an entry in the block table, K rows among the experts. Nobody has to keep all of
# that in mind. The *shape ledger* records every operator call, and `follow` reads one token's place in each tensor out
# of it.

# %% [markdown] tags=["zh"] pair="d048e8-32d395"
# **要点。** 在一步之内，词元只是一个下标，而且每到一个张量，下标就可能变：batch 里的一行、缓存里的一页一行、块表里的一项、
# 专家那边的 K 行。这些不必靠脑子记。*形状账本*（ledger）记下每一次算子调用，`follow` 从中读出一个词元在每个张量里的位置。

# %%
from trueup.core import ledger
from trueup.core.sampling import SamplingParams
from trueup.models import LLM

llm = LLM.from_pretrained("glm-4.7-flash-nano", progress=False)
engine = llm.engine
prompts = ["class Stack:\n    def __init__(self", "import os\nimport sys\n\ndef main(",
           "for name in sorted("]
params = SamplingParams(max_tokens=8, ignore_eos=True)
ids = [engine.add(llm.tokenizer.encode(prompt), params) for prompt in prompts]

with ledger.record(engine) as led:
    engine.step()  # the three prompts
    engine.step()  # one token of each
layout = led.rounds[1].layout
assert (layout.real_tokens, layout.padded_tokens) == (3, 4)  # T, Tp

# %% [markdown] tags=["en"]
# We follow the token of the third request in the second round. It has row 2 of the batch, and a slot in the cache. The
# dashed row is padding.

# %% [markdown] tags=["zh"] pair="40f90d-000f0c"
# 我们跟踪第三个请求在第二轮里的词元。它在 batch 里是第 2 行（行号从 0 数起），在缓存里有一个槽位。虚线框是填充。

# %% tags=["fold"]
from trueup.core.picture import boxes

[segment] = layout.segments
style = ["real" if request is not None else "pad" for request in segment.requests]


def row(label, values):
    return label, [(str(value), s) for value, s in zip(values, style, strict=True)]


places = [divmod(slot, layout.page_size) for slot in segment.slots]
names = ["dummy" if request is None else f"#{request}" for request in segment.requests]
pages, offsets = zip(*places, strict=True)
boxes([row("request", names), row("row [Tp]", range(4)), row("position", segment.positions),
       row("slot", segment.slots), row("page", pages), row("row in page", offsets)],
      ("Slot = page × 128 + row in page. Our token is the third column.",
       "槽位 = 页号 × 128 + 页内的行。我们的词元是第三列。"))

# %% [markdown] tags=["en"]
# ## The wrong way: one index for everything
#
# Row 2 of the batch, so row 2 everywhere? The ledger disagrees at the first cache write of the step:

# %% [markdown] tags=["zh"] pair="fdaec0-614333"
# ## 错误的做法：一个下标用到底
#
# 在 batch 里是第 2 行，那么处处都是第 2 行吗？到这一步第一次写缓存时，账本就给出了反例：

# %% tags=["raises-exception"] raises="AssertionError" says="npu_kv_rmsnorm_rope_cache: k_cache[3,"
token = ids[2]
assert layout.token_rows[token] == range(2, 3)  # row 2 of the batch

for stop in led[1].follow(token).stops:
    first_axis = stop.rows[0]
    assert first_axis == (2,), f"{stop.call.operator}: {stop.subscript}"

# %% [markdown] tags=["en"]
# ## Into layer 1
#
# The tables below show layer 1 of 3. Left: the tensor, with the token's index in it; an arrow marks a result. Middle:
# the axes that remain, that is, the token's own part. Right: the dtype, values where they are indices or lengths, and
# `written` where the operator writes to an argument. H is the hidden width, Rq the rank of the query's own latent, N
# the heads, Dr the width of the rotated part.
#
# Before attention the token is row 2 of everything. `npu_add_rms_norm` adds two tensors and normalises their sum: `x1`
# is the answer of layer 0, `x2` the *residual*, the running sum of everything before it. The results are `y`, the
# normalised row, `rstd`, the factor of that normalisation, and `x`, the sum itself.

# %% [markdown] tags=["zh"] pair="226357-25f69c"
# ## 进入第 1 层
#
# 下面各表是三层中的第 1 层（层号也从 0 数起）。左列是张量和词元在其中的下标，箭头表示结果；中列是剩下的轴，也就是属于这个词元的那部分；
# 右列是数据类型；若是下标或长度，就列出数值；`written` 表示算子写入了这个参数。
# H 是隐藏维度，Rq 是查询潜变量的秩（`q_lora_rank`），N 是头数，Dr 是旋转部分的宽度。
#
# 在注意力之前，这个词元在每个张量里都是第 2 行。`npu_add_rms_norm` 把两个张量相加，再对和做归一化：`x1` 是第 0 层的输出，
# `x2` 是*残差*，即在它之前所有输出的累加。结果有三个：`y` 是归一化后的行，`rstd` 是均方根的倒数（归一化时乘上它），`x` 就是那个和。

# %%
layer = led[1].only("layers.1")
trail = layer.only("layers.1.input_norm").follow(token)
assert {stop.rows[0] for stop in trail.stops} == {(2,)}  # row 2 throughout
trail

# %% [markdown] tags=["en"]
# The products with plain weight matrices between the operators (`x @ q_a.T` and the like) are not in the ledger. They
# keep the row.
#
# ## Through the cache
#
# Now the index changes. The latent and the rotated key go to the token's slot, which is in `index`: the caches are
# indexed by page and row in page. Attention then takes the *pages*; the token's request is entry 2 of the block table
# and of both lists of lengths. `actual_seq_kvlen` is the token's position plus one: it sees itself, too. R is the
# latent rank, Dn and Dv are a head's widths without rotation and of its value. What an operator leaves unwritten is not
# listed. The two calls of `npu_transpose_batchmatmul` are the up-projections of the absorbed form, before and after
# attention.
#
# The output has its heads first. The token is on the second axis there: `out[:, 2]`. And it has 8 heads, of which 5 are
# real: this operator takes powers of two ([chapter 5](ch05_mla.md)).

# %% [markdown] tags=["zh"] pair="425130-e68e6d"
# 算子之间与普通权重矩阵的乘法（如 `x @ q_a.T`）不在账本里，它们不改变行号。
#
# ## 穿过缓存
#
# 现在下标变了。潜变量和旋转后的键写进词元的槽位，槽位号在 `index` 里，而缓存的下标是页号和页内的行。
# 随后注意力拿到的是*页*：词元所属的请求，是块表里和两个长度列表里的第 2 项。`actual_seq_kvlen` 等于词元的位置加一，
# 因为它也看得见自己。R 是潜变量的秩，Dn 和 Dv 是一个头不旋转部分的宽度和值的宽度。算子不会写入的输出不列出。
# 两次 `npu_transpose_batchmatmul` 是吸收式的两个上投影，一个在注意力之前，一个在之后。
#
# 输出把头放在最前面，词元到了第二个轴上：`out[:, 2]`。它有 8 个头，其中 5 个是真实的，
# 因为这个算子只接受 2 的幂个头（见[第 5 章](ch05_mla.md)）。

# %%
trail = layer.only("layers.1.attention").follow(token)
at = {(stop.call.operator, stop.operand.name): stop for stop in trail.stops}
fia = "npu_fused_infer_attention_score_v2"
write = "npu_kv_rmsnorm_rope_cache"

page, offset = places[2]
assert at[write, "ckv_cache"].subscript == f"ckv_cache[{page}, {offset}]"
assert at[write, "index"].values == (segment.slots[2],)
assert at[fia, "block_table"].values == (page,)
assert at[fia, "actual_seq_kvlen"].values == (segment.positions[2] + 1,)
assert (at[fia, "out"].subscript, at[fia, "out"].shape) == ("out[:, 2]", "[N 5 of 8, R 512]")
trail

# %% [markdown] tags=["en"]
# The pools agree: the row at the token's slot is filled, and the one after it is not yet.

# %% [markdown] tags=["zh"] pair="a4da21-32ec01"
# 到缓存池里核对：词元槽位上的那一行已经写入，后面一行还没有。

# %%
latent, rope = engine.pools.paged(1)  # [pages, P, R], [pages, P, Dr] of layer 1
assert latent[page, offset].any() and rope[page, offset].any()
assert not latent[page, offset + 1].any()  # where its next token goes

# %% [markdown] tags=["en"]
# ## Among the experts
#
# The router chooses K = 2 experts. `npu_moe_init_routing_v2` copies the row twice and sorts all copies by expert, so
# one token becomes two rows. `expanded_row_idx` says which: it has T*K entries, one for each choice of each token. S
# counts the sorted rows. I is the width inside an expert, written 2I where gate and up stand side by side. The shared
# expert works on the unsorted rows, where the token is still row 2. The last operator brings the answers back to row 2.

# %% [markdown] tags=["zh"] pair="d17010-fc612d"
# ## 在专家之间
#
# 路由器选出 K = 2 个专家。`npu_moe_init_routing_v2` 把这一行复制两份，再把全部副本按专家排序，于是一个词元变成两行。
# 是哪两行由 `expanded_row_idx` 说明，它有 T*K 项，每个词元的每个选择占一项。S 是排好序的行数，I 是专家内部的宽度，
# gate 与 up 并排时写作 2I。共享专家处理的是未排序的行，词元在那里仍是第 2 行。最后一个算子把结果送回第 2 行。

# %%
trail = layer.only("layers.1.mlp").follow(token)
at = {(stop.call.owner, stop.call.operator, stop.operand.name): stop for stop in trail.stops}
moe, shared = "layers.1.mlp", "layers.1.mlp.shared"

rows = at[moe, "npu_moe_init_routing_v2", "expanded_row_idx"].values  # of its two choices
assert at[moe, "npu_moe_init_routing_v2", "expanded_x"].rows[0] == rows
assert at[moe, "npu_grouped_matmul", "x[0]"].rows[0] == rows
assert at[shared, "npu_swiglu", "y"].rows[0] == (2,)
assert at[moe, "npu_moe_finalize_routing", "out"].subscript == "out[2]"
trail

# %% [markdown] tags=["en"]
# ## What differs in another step
#
# A row number belongs to one round. We abort the first request. Two are left, so the batch needs no padding, and our
# request moves up to row 1. Its slot is the next one of its page: a cache row stays where it is as long as the request
# lives.

# %% [markdown] tags=["zh"] pair="53ab21-018387"
# ## 换一步，哪些会变
#
# 行号只属于一轮。中止第一个请求：还剩两个，这个 batch 不用填充，我们的请求上移到第 1 行。它的槽位是本页的下一个：
# 只要请求还在，缓存行就不会挪动。

# %%
engine.abort(ids[0])
with ledger.record(engine) as later:
    engine.step()
moved = later.rounds[0].layout
assert moved.token_rows[token] == range(1, 2) and moved.padded_tokens == 2
assert moved.slots[1] == layout.slots[2] + 1
layer.diff(later.only("layers.1"))

# %% [markdown] tags=["en"]
# So nothing that outlives a round may be stored under a row number. The engine keys it by request id, and
# [`Rows`][trueup.core.Rows] ties a tensor of rows to its layout.

# %% [markdown] tags=["zh"] pair="5f8f63-52c828"
# 所以，凡是要保留到下一轮的东西，都不能按行号存放。引擎按请求 id 存；[`Rows`][trueup.core.Rows] 把一个按行排列的张量与它的布局绑在一起。

# %%
assert layout.requests.index(token) == 2 and moved.requests.index(token) == 1
assert set(moved.token_rows) == {ids[1], token}

# %% [markdown] tags=["en"]
# ## What real engines do
#
# They keep the same numbers under other names. The slot of each token row is `out_cache_loc` in sglang and
# `slot_mapping` in vllm-ascend. For padded rows sglang writes slot 0 there, on a dummy page, and vllm-ascend writes -1.
# The rows among the experts are `expanded_row_idx` in vllm-ascend too, for it calls the same operator
# (`vllm_ascend/ops/fused_moe/token_dispatcher.py`).
#
# ## Exercises
#
# **1.** In the first round, the prompts, which row holds the *last* prompt token of our request? And which slot?

# %% [markdown] tags=["zh"] pair="fdbdd6-6c7ecb"
# ## 真实引擎怎么做
#
# 它们也有这些量，只是名字不同。每个词元行的槽位，在 sglang 里叫 `out_cache_loc`，在 vllm-ascend 里叫 `slot_mapping`。
# 对填充行，sglang 写 0 号槽位（在哑页上），vllm-ascend 写 -1。专家之间的行号，在 vllm-ascend 里也叫 `expanded_row_idx`，
# 因为它调用的是同一个算子（`vllm_ascend/ops/fused_moe/token_dispatcher.py`）。
#
# ## 练习
#
# **1.** 在第一轮，也就是处理提示词的那一轮，我们的请求的*最后*一个提示词词元在哪一行？槽位是多少？

# %% tags=["solution"]
lengths = [len(llm.tokenizer.encode(prompt)) for prompt in prompts]
trail = led[0].follow(token, row=lengths[2] - 1)
query = next(stop for stop in trail.stops if stop.operand.name == "query")
assert query.rows[0] == (sum(lengths) - 1,)  # the last row of all
assert led.rounds[0].layout.slots[-1] == layout.slots[2] - 1

# %% [markdown] tags=["en"]
# **2.** Some tensors of the step have no place for our token. Which, and why?

# %% [markdown] tags=["zh"] pair="261aa0-402bda"
# **2.** 这一步里有些张量没有我们的词元的位置。是哪些？为什么？

# %% [markdown] tags=["en", "solution"]
# The weights, which belong to all tokens; the counts of rows for each expert, into which it has gone as a number; and
# what an operator leaves unwritten.

# %% [markdown] tags=["zh", "solution"] pair="c1d40e-70b26a"
# 权重，它属于所有词元；每个专家的行数，词元在那里只被计了一次数；还有算子不会写入的输出。

# %% tags=["solution"]
visited = {(stop.call.number, stop.operand.name) for stop in led[1].follow(token).stops}
left_out = {operand.name for call in led[1].calls for operand in call.operands + call.results
            if (call.number, operand.name) not in visited and not operand.unwritten}
assert left_out == {"gamma", "weight", "weight[0]", "bias", "counts", "group_list"}

# %% [markdown] tags=["en"]
# ## On an NPU machine
#
# The same cells are meant to run there; the ledger listens at the dispatcher, so it does not matter whose kernels
# answer. No device has run them yet: see [what ran where](../what-ran-where.md).
#
# ## The whole step
#
# All three layers, for reference. In a terminal `trueup ledger --follow 3` prints the same.

# %% [markdown] tags=["zh"] pair="e04747-813408"
# ## 在 NPU 机器上
#
# 同样的单元格按设计在那里也能运行。账本挂在分发器上，所以由谁的内核执行都一样。本章还没有在任何设备上运行过，
# 见[哪些在哪里跑过](../what-ran-where.md)。
#
# ## 完整的一步
#
# 全部三层，供查阅。在终端里，`trueup ledger --follow 3` 打印同样的内容。

# %%
trail = led[1].follow(token)
# It takes part in every call.
assert {stop.call.number for stop in trail.stops} == {call.number for call in led[1].calls}
trail
