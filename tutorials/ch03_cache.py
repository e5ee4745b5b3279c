# ---
# title:
#   en: "3. A paged cache"
#   zh: "3. 分页缓存"
# outcome:
#   en: you can say where any token's cache row lies, write it, read it back, and prove that no page was lost
#   zh: 能说出任何一个词元的缓存行在哪里，会写、会读，还能证明没有丢页
# minutes: 17
# prerequisites:
#   en: "[chapter 2](ch02_shapes.md)"
#   zh: "[第 2 章](ch02_shapes.md)"
# bugs: [SB-22, SB-25]
# hardware:
#   en: any laptop; the same cells run on an NPU machine
#   zh: 任何笔记本电脑；同样的单元格也能在 NPU 机器上运行
# ---

# %% [markdown] tags=["en"]
# **The claim.** A paged cache needs one fact about each request: the list of its pages. Where a token is written,
# where it is read, how much is free: all of it is arithmetic on that list.
#
# ## The smallest picture
#
# Attention reads a row for every earlier token, so the cache keeps one row for each token and layer. Requests grow, and
# nobody knows how far. Memory for the longest possible text, reserved for every request, would stay mostly empty. So
# the memory, the *pool*, is cut into *pages* of P rows, and a request takes a page when it needs one. P is 16 here, the
# smallest page that the attention operator takes for MLA; engines on NPUs use 128.
#
# Three requests, A with 20 tokens, B with 5 and C with 33, have taken their pages one after the other:

# %% [markdown] tags=["zh"] pair="76bf9d-ce2afb"
# **要点。** 分页缓存（paged cache）对每个请求只需要知道一件事：它有哪些页。词元写到哪里、从哪里读、还剩多少空间，
# 都只是对这个列表做算术。
#
# ## 最小的一张图
#
# 注意力要读前面每个词元的一行，所以缓存为每个词元、每一层保存一行。请求会变长，谁也不知道会长到多长。
# 如果给每个请求留一整块够放最长文本的内存，大部分会空着。所以把这片内存，也就是*池子*（pool），
# 切成每页 P 行的*页*（page），请求需要时才拿一页。这里 P 是 16，是注意力算子对 MLA 支持的最小页；NPU 上的引擎用 128。
#
# 三个请求，A 有 20 个词元，B 有 5 个，C 有 33 个，先后拿到了自己的页：

# %% tags=["fold"]
import torch

from trueup.core import Engine, EngineConfig, audit, ledger, load, materialise, plan
from trueup.core.cache import CacheSpec, Pools
from trueup.core.device import pick_device
from trueup.core.layers.rope import rope_cos_sin
from trueup.core.layout import Mode
from trueup.core.ops.contract import profile
from trueup.core.pages import PagePool
from trueup.core.planning import Work
from trueup.core.sampling import SamplingParams
from trueup.core.view import causal_mask
from trueup.models import LLM

# %%
P = 16
ids = PagePool(num_pages=8, page_size=P)
A, B, C = ids.allocate(1), ids.allocate(1), ids.allocate(2)
A += ids.allocate(1)  # A has grown past 16 tokens
C += ids.allocate(1)  # and C past 32
pages, lengths = {"A": A, "B": B, "C": C}, {"A": 20, "B": 5, "C": 33}
assert pages == {"A": (1, 5), "B": (2,), "C": (3, 4, 6)}


def slot(pages, position):
    """Where the token at a position of a request lies."""
    return pages[position // P] * P + position % P

# %% tags=["fold"]
from trueup.core.picture import boxes

owner = {slot(pages[r], i): r for r, n in lengths.items() for i in range(n)}
rows = [(f"page {page}", [(owner[s], "real") if s in owner else ("", "pad") for s in range(page * P, page * P + P)])
        for page in range(8)]
boxes(rows, ("A pool of 8 pages with 16 slots each. Page 0 is the dummy page, page 7 is free.",
             "8 页的池子，每页 16 个槽位。第 0 页是哑页，第 7 页空闲。"))

# %% [markdown] tags=["en"]
# All rows of the pool are numbered from 0, page after page; the number of a row is its *slot*. The token at some
# position of a request lies in slot `pages[position // P] * P + position % P`. A *block table* holds the page ids of a
# batch, one line for each request, filled up with 0. Page 0 is the *dummy page*: it is never handed out, and padding
# points to it.

# %% [markdown] tags=["zh"] pair="4af3de-5d75ec"
# 池子里的行从 0 开始，一页接一页统一编号，行号就是*槽位*（slot）。请求中某个位置的词元，
# 槽位是 `pages[position // P] * P + position % P`。*块表*（block table）存放一个 batch 的页号，每个请求一行，
# 不足的用 0 填充。第 0 页是*哑页*：从不分配，填充都指向它。

# %%
assert slot(A, 17) == 5 * 16 + 1 == 81  # A's second page is page 5

prompts = [Work(i, Mode.PREFILL, 0, lengths[r], pages[r]) for i, r in enumerate("ABC")]
layout = plan(prompts, page_size=P)  # the three texts as prompts: 58 token rows
assert layout.slots == tuple(slot(pages[r], i) for r in "ABC" for i in range(lengths[r]))
assert layout.segments[0].pages == ((1, 5, 0), (2, 0, 0), (3, 4, 6))

# %% [markdown] tags=["en"]
# ## What a row holds
#
# In plain multi-head attention a row holds a key and a value for every head. MLA keeps one *latent* of width R and one
# *rope* key of width Dr, and all heads share them. GLM-4.7-Flash has R = 512 and Dr = 64. In bfloat16, two bytes a
# number, that is 1,152 bytes for a token and layer, whatever the number of heads. Keys and values for its 20 heads,
# each 256 wide, would take 20,480. All layers together, 47 and one that drafts tokens (*MTP*, [chapter
# 6](ch06_glm.md)), take 55,296 bytes a token.

# %% [markdown] tags=["zh"] pair="264dc9-6ceca4"
# ## 一行里有什么
#
# 普通的多头注意力，一行里有每个头的键和值。MLA 只存一个宽度为 R 的*潜变量*（latent）和一个宽度为 Dr 的 *rope* 键，
# 所有头共用。GLM-4.7-Flash 的 R = 512，Dr = 64。bfloat16 每个数两字节，所以每个词元、每层 1,152 字节，与头数无关。
# 如果给它的 20 个头分别存宽度 256 的键和值，则要 20,480 字节。
# 全部层加起来，47 层外加一个猜草稿词元的层（*MTP*，见[第 6 章](ch06_glm.md)），每个词元占 55,296 字节。

# %%
def flash(layers):
    return CacheSpec(layers, latent=512, rope=64, dtype=torch.bfloat16, device=torch.device("cpu"))


assert flash(layers=1).bytes_per_token == (512 + 64) * 2 == 1_152
assert 20 * (256 + 256) * 2 == 20_480
assert flash(layers=48).bytes_per_token == 55_296  # 47 layers and the MTP layer

# %% [markdown] tags=["en"]
# The two parts live in separate pools, [pages, P, 1, R] and [pages, P, 1, Dr] for each layer, because the operators
# take them as separate arguments.
#
# ## Writing, and the wrong way round
#
# One fused operator writes a row: it normalises the latent, rotates the rope part by the position, and stores both
# at the slot. `store` calls it; the two pools are its last arguments. The parts are called "latent and rope", so let
# us pass them in that order. (The widths are tiny again, as in chapter 2.)

# %% [markdown] tags=["zh"] pair="183b34-fc96e7"
# 这两部分放在两个池子里，每层各一个，形状是 [pages, P, 1, R] 和 [pages, P, 1, Dr]，因为算子把它们当作两个参数。
#
# ## 写入，以及传反的两个池子
#
# 一个融合算子完成一行的写入：归一化潜变量，按位置旋转 rope 部分，再把两者存到槽位上。下面的 `store` 调用它，
# 最后两个参数是两个池子。习惯上总说“latent 和 rope”，那就按这个顺序传。（宽度还是像第 2 章那样取得很小。）

# %%
load()
device = pick_device()
N, R, Dr, dtype, rules = 2, 8, 4, torch.float64, lambda: profile("paper")  # N query heads
tolerance = 1e-9
if device.type == "npu":
    R, Dr, dtype, rules, tolerance = 512, 64, torch.bfloat16, audit, 2e-2
torch.manual_seed(0)


def random(*shape):
    return torch.randn(*shape).to(device, dtype)


def equal(a, b):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)

# %%
pools, gamma = Pools(CacheSpec(1, R, Dr, dtype, device), ids), torch.ones(R, device=device, dtype=dtype)


def store(kv, positions, slots, first, second):
    """Rows kv [T, R+Dr] into two pools."""
    cos, sin = rope_cos_sin(torch.tensor(positions, device=device), Dr, 10_000.0, dtype)  # [T, 1, 1, Dr] twice
    with rules():
        torch.ops.npu.npu_kv_rmsnorm_rope_cache(
            kv[:, None, None], gamma, cos, sin, torch.tensor(slots, device=device),
            first, second, cache_mode="PA")

# %% tags=["raises-exception"] raises="ContractError" says="k_cache is the rope cache and comes first"
kv = random(58, R + Dr)  # [T, R+Dr], T = 20 + 5 + 33
store(kv, layout.positions, layout.slots, pools.latent[0], pools.rope[0])

# %% [markdown] tags=["en"]
# The **rope** pool comes first. The operator's names hide it: `k_cache` is the rope pool, `ckv_cache` the latent pool.
# (The message cites [SB-26](../bugs.md#sb-26), another bug in which a cache and its rows differ in width.)

# %% [markdown] tags=["zh"] pair="991ef1-f290a3"
# **rope** 的池子在前。算子的参数名看不出这一点：`k_cache` 是 rope 池，`ckv_cache` 是潜变量池。
# 消息里引用了 [SB-26](../bugs.md#sb-26)：那也是缓存与行的宽度不一致的缺陷。

# %%
store(kv, layout.positions, layout.slots, pools.rope[0], pools.latent[0])

latent, rope = pools.paged(0)  # the same memory as [pages, P, R] and [pages, P, Dr]
stored, _ = pools.gather(0, torch.tensor(layout.slots, device=device))  # [T, R]
c = kv[:, :R]  # [T, R]
equal(stored, c / (c.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt())  # 1e-5 is the operator's epsilon
assert latent.any(-1).sum() == 58 and not latent[0].any() and not latent[7].any()  # exactly 58 slots

# %% [markdown] tags=["en"]
# The model makes the same call in every layer, with its own epsilon. Here is layer 0 of the nano model in one round, as
# the shape ledger saw it. The last column names the pools. (`is_output_kv` asks for the new rows as results, too:
# attention over a prompt uses them directly, [chapter 5](ch05_mla.md).)

# %% [markdown] tags=["zh"] pair="64543d-f994d9"
# 模型在每一层都做同样的调用，只是 epsilon 用自己的。下面是形状账本对 nano 模型（[第 1 章](ch01_run.md)的小模型）第 0 层的记录，
# 取自其中一轮；最后一列写明了池子的名字。
# （`is_output_kv` 表示把新写的行也作为结果返回：对提示词做注意力时直接用它们，见[第 5 章](ch05_mla.md)。）

# %%
llm = LLM.from_pretrained("glm-4.7-flash-nano", progress=False)
llm.engine.add(llm.tokenizer.encode("import os\n"), SamplingParams(max_tokens=1))
with ledger.record(llm.engine) as led:
    llm.engine.step()
write = led.only(owner="layers.0", operator="npu_kv_rmsnorm_rope_cache")
taken = {operand.name: operand.source for operand in write.calls[0].operands}
assert (taken["k_cache"], taken["ckv_cache"]) == ("pools.rope[0]", "pools.latent[0]")
write

# %% [markdown] tags=["en"]
# ## Reading through the block table
#
# Attention gets the pools, the block table and the lengths, and collects each request's rows itself. Doing it by hand
# takes one line: pick the pages, join them, cut at the length. The operator's answer must be softmax attention over
# exactly those rows, in which latents are keys and values at once ([chapter 5](ch05_mla.md)).

# %% [markdown] tags=["zh"] pair="03d63c-8618d5"
# ## 通过块表读取
#
# 注意力算子拿到池子、块表和长度，自己把每个请求的行找齐。手工做只要一行：按页号取页，拼起来，按长度截断。
# 算子的结果必须等于对这些行做 softmax 注意力，
# 其中潜变量既当键又当值（见[第 5 章](ch05_mla.md)）。

# %%
def attend(q, q_rope, q_cum, kv_lens, table):
    with rules():
        return torch.ops.npu.npu_fused_infer_attention_score_v2(
            q, latent, latent, query_rope=q_rope, key_rope=rope, input_layout="TND", softmax_scale=0.3,
            actual_seq_qlen=q_cum, actual_seq_kvlen=kv_lens, block_table=table, block_size=P,
            sparse_mode=3, atten_mask=causal_mask(device), num_query_heads=N, num_key_value_heads=1)[0]


q, q_rope = random(3, N, R), random(3, N, Dr)  # [T, N, R], [T, N, Dr]: one new token for each request
table = materialise(layout, pools).segments[0].block_table  # [B, columns]
out = attend(q, q_rope, [1, 2, 3], [20, 5, 33], table)  # [T, N, R]

for b, length in enumerate(lengths.values()):
    c = latent[table[b].long()].flatten(0, 1)[:length]  # [S, R]: pages picked, joined and cut
    k = rope[table[b].long()].flatten(0, 1)[:length]  # [S, Dr]
    scores = 0.3 * (q[b] @ c.T + q_rope[b] @ k.T)  # [N, S]
    equal(out[b], scores.softmax(-1) @ c)

# %% [markdown] tags=["en"]
# Nothing else in the pool may matter: not the rest of a last page, not a free page, not the dummy page to which the
# unused entries of the table point. To test it, fill all of that with NaN, which no arithmetic removes. The result
# must not move by one bit.

# %% [markdown] tags=["zh"] pair="0682cf-c67dec"
# 池子里其他内容都不能有影响：最后一页的剩余部分、空闲页、块表中没用到的项所指的哑页。检验办法是把这些地方全填成 NaN，
# 它经过任何运算都不会消失。结果必须逐位相同。

# %%
others = torch.tensor(sorted(set(range(8 * P)) - set(layout.slots)), device=device)
latent.flatten(0, 1)[others], rope.flatten(0, 1)[others] = float("nan"), float("nan")
assert torch.equal(attend(q, q_rope, [1, 2, 3], [20, 5, 33], table), out)

# %% [markdown] tags=["en"]
# ## Pages are neither lost nor doubled
#
# A page belongs to one request or is free. After every step the free pages and the held pages together must be all
# pages but page 0. This is easy to check, because `PagePool` knows only integers:

# %% [markdown] tags=["zh"] pair="300903-b8201c"
# ## 页不会丢失，也不会重复分配
#
# 一页要么属于一个请求，要么空闲。每一步之后，空闲页加上被持有的页，必须正好是除第 0 页外的全部页。这很容易检查，
# 因为 `PagePool` 只和整数打交道：

# %%
from random import Random

rng, pool, held = Random(0), PagePool(num_pages=9, page_size=P), []
for _ in range(300):
    if pool.free and rng.random() < 0.5:
        held.append(pool.allocate(rng.randint(1, pool.free)))
    elif held:
        pool.release(held.pop(rng.randrange(len(held))))
    owned = [page for request in held for page in request]
    assert pool.free + len(owned) == 8 and len(set(owned)) == len(owned) and 0 not in owned

# %% [markdown] tags=["en"]
# The classic way to break it is to free a request twice, say when it is aborted and finishes in the same round. Two
# requests would then get the same page and overwrite each other's rows. The second release is refused:

# %% [markdown] tags=["zh"] pair="8aca32-5691f9"
# 最典型的破坏方式是把一个请求释放两次，例如它在同一轮里既被中止又正常结束。之后两个请求会拿到同一页，互相覆盖。
# 第二次释放会被拒绝：

# %% tags=["raises-exception"] raises="ValueError" says="is not held"
pool = PagePool(num_pages=9, page_size=P)
finished = pool.allocate(2)
pool.release(finished)
pool.release(finished)

# %% [markdown] tags=["en"]
# ## Keys that nobody has written yet
#
# A long prompt is processed in *chunks*, so that it does not hold up the requests that decode. A chunk sees the tokens
# before it and its own. So its key length ends with the chunk. In [SB-22](../bugs.md#sb-22) (nano-vllm PR #213) it was
# the length of the whole prompt, and attention read slots that nobody had written. Here 10 tokens run in chunks of 4,
# and free slots hold NaN:

# %% [markdown] tags=["zh"] pair="6c495d-64cb12"
# ## 还没有人写过的键
#
# 长提示词切成*分块*（chunk）处理，免得拖住正在解码的请求。一个分块看得到它前面的词元和它自己的词元，
# 所以键长度到分块末尾为止。
# 在 [SB-22](../bugs.md#sb-22)（nano-vllm PR #213）里，键长度取成了整个提示词的长度，注意力读到了没人写过的槽位。
# 这里 10 个词元按每块 4 个处理，空闲槽位里是 NaN：

# %%
kv, q, q_rope = random(10, R + Dr), random(10, N, R), random(10, N, Dr)  # [T, R+Dr], [T, N, R], [T, N, Dr]


def prefill(chunk, key_length):
    """The prompt's attention, chunk by chunk: [10, N, R]; and the key lengths that were used."""
    latent.fill_(float("nan")), rope.fill_(float("nan"))
    parts, used = [], []
    for start in range(0, 10, chunk):
        rows = slice(start, min(start + chunk, 10))
        layout = plan([Work(0, Mode.PREFILL, start, rows.stop - start, (7,))], page_size=P)
        seg = materialise(layout, pools).segments[0]
        store(kv[rows], layout.positions, layout.slots, pools.rope[0], pools.latent[0])
        used.append(key_length(seg))
        parts.append(attend(q[rows], q_rope[rows], seg.q_cum, [used[-1]], seg.block_table))
    return torch.cat(parts), used

# %% tags=["raises-exception"] raises="AssertionError" says="NaN in 8 of 10 rows"
wrong, used = prefill(chunk=4, key_length=lambda seg: 10)  # the whole prompt
bad = wrong.isnan().flatten(1).any(1).sum().item()
assert bad == 0, f"NaN in {bad} of {len(wrong)} rows"

# %% [markdown] tags=["en"]
# Only the last chunk is right, because there the prompt ends with the chunk. Without the NaN this hides well: a
# pool of zeros gives finite numbers. `plan` counts from the chunk, and every chunk size gives the result of the
# unchunked prompt.

# %% [markdown] tags=["zh"] pair="89b968-e2abd3"
# 只有最后一个分块是对的，因为提示词正好在这里结束。如果不填 NaN，这个缺陷藏得很深：
# 池子全为零时，算出来的数都有限，看不出异常。`plan` 按分块计算长度，无论分块多大，结果都与不分块相同。

# %%
whole, used = prefill(chunk=10, key_length=lambda seg: seg.kv_lens[0])
assert whole.isfinite().all() and used == [10]
for chunk in (1, 3, 4, 9):
    out, used = prefill(chunk, key_length=lambda seg: seg.kv_lens[0])
    equal(out, whole)
    assert chunk != 4 or used == [4, 8, 10]

# %% [markdown] tags=["en"]
# The same test on the whole engine: the nano model, its pools filled with NaN (except the dummy page, which padding
# reads), its prompts cut into chunks of 3. The tokens are those of the unchunked run, and at the end every page is
# free.

# %% [markdown] tags=["zh"] pair="3e3ed5-f4ede5"
# 对整个引擎做同样的检验：nano 模型，池子里填满 NaN（哑页除外，填充行要读它），提示词切成每块 3 个词元。生成的词元与不分块时相同，
# 结束时所有页都空闲。

# %%
def run(prefill_tokens):
    engine = Engine(llm.model, EngineConfig(num_pages=9, page_size=P, prefill_tokens=prefill_tokens))
    for pool in (*engine.pools.latent, *engine.pools.rope):
        pool[1:] = float("nan")
    tokens = {}
    for text in ("def read_file(path):\n", "class Stack:\n"):
        request = engine.add(llm.tokenizer.encode(text), SamplingParams(max_tokens=8, ignore_eos=True))
        tokens[request] = ()
    while engine.has_work:
        for request, new in engine.step().tokens.items():
            tokens[request] += new
    assert engine.pages.free == 8
    return tokens


assert run(prefill_tokens=3) == run(prefill_tokens=512)

# %% [markdown] tags=["en"]
# ## Offsets do not fit into 32 bits
#
# A kernel turns a slot into an address: slot times row width. In [SB-25](../bugs.md#sb-25) (vllm issue #1486) that
# product was computed in 32 bits, which end at 2,147,483,647. A slot number fits for a long time, its offset does
# not. Take a pool that keeps latent and rope part together, 576 numbers a row and 128 rows a page: it passes the limit
# in page 29,127. So `npu_kv_rmsnorm_rope_cache` wants 64-bit slots. Other operators also take 32-bit ones, so a
# `PagePool` refuses to have more slots than 32 bits can number.

# %% [markdown] tags=["zh"] pair="131529-bf3bfe"
# ## 偏移量超出 32 位
#
# 内核要把槽位换算成地址：槽位乘以行宽。在 [SB-25](../bugs.md#sb-25)（vllm issue #1486）里，这个乘积按 32 位计算，
# 而 32 位最大只到 2,147,483,647。槽位号离上限还远，偏移量却已经放不下了。
# 假设一个池子把潜变量和 rope 放在一起，每行 576 个数、每页 128 行，
# 在第 29,127 页就越过这个上限。所以 `npu_kv_rmsnorm_rope_cache` 要求 64 位的槽位。别的算子也接受 32 位槽位，
# 因此 `PagePool` 的槽位数不得超过 32 位能编号的范围。

# %%
limit = 2**31 - 1
page = limit // (128 * 576)  # the page in which the limit lies
assert page == 29_127 and page * 128 < limit  # the slot number still fits
first_of_next = torch.tensor((page + 1) * 128, dtype=torch.int32)
assert (first_of_next * 576).item() < 0  # in 32 bits: a negative offset
assert (first_of_next.long() * 576).item() == 2_147_549_184

# %% tags=["raises-exception"] raises="ValueError" says="use fewer pages"
PagePool(num_pages=2**24 + 1, page_size=128)

# %% [markdown] tags=["en"]
# ## What real engines do
#
# - **sglang** uses pages of 128 on NPUs, keeps page 0 for padding, and starts with zeroed pools, latent and rope apart
#   (`sglang: srt/hardware_backend/npu/memory_pool_npu.py`).
# - **vllm-ascend** uses blocks of 128 for MLA and passes the pair (latent, rope) to the fused write as
#   `kv_cache[1], kv_cache[0]` (`vllm-ascend: vllm_ascend/attention/mla_v1.py`).
# - **nano-vllm** keeps ids apart from tensors, as trueup does (`nano-vllm: nanovllm/engine/block_manager.py`).
#
# trueup's scheduler is simpler than all of them: when a request is admitted it gets every page that its prompt and
# `max_tokens` can need.
#
# ## Exercises
#
# **1.** A request has `a` cached tokens and will have `b`. How many new pages does it need?

# %% [markdown] tags=["zh"] pair="091abb-3a8471"
# ## 真实引擎怎么做
#
# - **sglang** 在 NPU 上用 128 的页，第 0 页留给填充，池子初始为零，
#   潜变量和 rope 分开存（`sglang: srt/hardware_backend/npu/memory_pool_npu.py`）。
# - **vllm-ascend** 对 MLA 用 128 的块，
#   把 (latent, rope) 这一对按 `kv_cache[1], kv_cache[0]` 传给融合写算子（`vllm-ascend: vllm_ascend/attention/mla_v1.py`）。
# - **nano-vllm** 和 trueup 一样，把编号和张量分开管理（`nano-vllm: nanovllm/engine/block_manager.py`）。
#
# trueup 的调度器比它们都简单：请求被接纳时，一次拿到提示词和 `max_tokens` 可能用到的全部页。
#
# ## 练习
#
# **1.** 一个请求已缓存 `a` 个词元，将要有 `b` 个。它需要几个新页？

# %% tags=["solution"]
def new_pages(a, b):
    return -(-b // P) - -(-a // P)  # rounded up, before and after


assert (new_pages(0, 1), new_pages(15, 16), new_pages(16, 17), new_pages(20, 33)) == (1, 0, 1, 1)
assert all(new_pages(0, n) == ids.pages_for(n) for n in range(100))

# %% [markdown] tags=["en"]
# **2.** How many tokens of GLM-4.7-Flash fit into 16 GiB of cache, in pages of 128?

# %% [markdown] tags=["zh"] pair="c543e8-249fc5"
# **2.** 16 GiB 的缓存，按每页 128 个词元，能放下 GLM-4.7-Flash 的多少个词元？

# %% tags=["solution"]
num_pages = 16 * 2**30 // (128 * flash(layers=48).bytes_per_token)
assert num_pages == 2_427
assert (num_pages - 1) * 128 == 310_528  # page 0 holds nobody's tokens

# %% [markdown] tags=["en"]
# **3.** The swapped pools were refused because their widths differ. Show that with R = Dr = 4 nothing is refused and
# the parts end up in each other's pools. (Only a laptop takes such widths.)

# %% [markdown] tags=["zh"] pair="5ff8ec-b21c12"
# **3.** 传反的池子之所以被拒绝，是因为宽度不同。用代码说明：R = Dr = 4 时没有任何报错，两部分互相写进了对方的池子。
# 只有在笔记本电脑上才接受这样的宽度。

# %% tags=["solution"]
from trueup.core.ops.registry import OPERATORS

first, second = torch.zeros(2, P, 1, 4), torch.zeros(2, P, 1, 4)  # [pages, P, 1, R], [pages, P, 1, Dr]
row = torch.tensor([3.0, 0, 0, 0, 5, 0, 0, 0]).view(1, 1, 1, 8)  # latent (3, 0, 0, 0), rope (5, 0, 0, 0)
cos, sin = rope_cos_sin(torch.tensor([0]), 4, 10_000.0, torch.float32)  # position 0: no rotation
with profile("paper"):
    OPERATORS["npu_kv_rmsnorm_rope_cache"](  # the reference kernel, on any machine
        row, torch.ones(4), cos, sin, torch.tensor([P]), first, second, cache_mode="PA")
assert first[1, 0, 0, 0] == 5  # the "latent" pool, passed first, holds the rope part
assert abs(second[1, 0, 0, 0] - 2) < 1e-4  # and the other the latent, normed: 3 / sqrt(9 / 4)

# %% [markdown] tags=["en"]
# **4.** Which pages a request holds cannot matter. Move A from pages (1, 5) to (4, 2) of an emptied pool and show
# that its attention stays the same.

# %% [markdown] tags=["zh"] pair="19b370-82785b"
# **4.** 请求持有哪几页不应该有影响。清空池子，把 A 从第 (1, 5) 页搬到第 (4, 2) 页，用代码说明它的注意力结果不变。

# %% tags=["solution"]
def attention_of_a(held):
    latent.zero_(), rope.zero_()
    layout = plan([Work(0, Mode.PREFILL, 0, 20, held)], page_size=P)
    store(kv_a, layout.positions, layout.slots, pools.rope[0], pools.latent[0])
    table = torch.tensor([held], dtype=torch.int32, device=device)  # [1, 2]
    return attend(q[:1], q_rope[:1], [1], [20], table)


kv_a = random(20, R + Dr)  # [T, R+Dr]
equal(attention_of_a((1, 5)), attention_of_a((4, 2)))

# %% [markdown] tags=["en"]
# ## On an NPU machine
#
# Install `torch_npu` beside the packages and run all cells. The widths become 512 and 64, the numbers bfloat16, and
# `audit` stops the wrong calls before a kernel sees them. That a device never reads past a request's length is what its
# documents say; the NaN cells are the test of it. In bfloat16 the two runs at the end of SB-22 may differ where two
# tokens are almost equally likely, and the assertion fails: that is rounding, not a stray read. No device has run this
# chapter yet; [what ran where](../what-ran-where.md) keeps the account.

# %% [markdown] tags=["zh"] pair="e8fe50-ff1d83"
# ## 在 NPU 机器上
#
# 除这些软件包外再装上 `torch_npu`，然后运行全部单元格。宽度变成 512 和 64，数据类型变成 bfloat16，
# `audit` 会在内核看到错误调用之前拦下它们。设备不会读到请求长度之外，这是文档的说法；
# 填 NaN 的那几个单元格正好检验这一点。“还没有人写过的键”一节末尾的两次运行，在 bfloat16 下可能在两个词元概率几乎相等的地方分叉，断言随之失败：
# 那是舍入所致，不是读错。本章还没有在任何设备上运行过，详见[哪些在哪里跑过](../what-ran-where.md)。
