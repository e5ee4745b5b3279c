# ---
# title:
#   en: "5. MLA, expanded and absorbed"
#   zh: "5. MLA：展开式与吸收式"
# outcome:
#   en: both forms of MLA written by hand and proved equal, and a reason for every size in the operator calls
#   zh: 亲手写出 MLA 的两种形式并证明它们相等，弄清算子调用里每个尺寸的由来
# minutes: 19
# prerequisites:
#   en: "softmax attention; [chapter 3](ch03_cache.md) (pages) and [chapter 4](ch04_operators.md) (contracts)"
#   zh: "softmax 注意力；[第 3 章](ch03_cache.md)（页）和[第 4 章](ch04_operators.md)（契约）"
# bugs: [SB-06, SB-27]
# hardware:
#   en: any laptop; on an NPU machine the operator cells take the smallest sizes its kernels accept
#   zh: 任何笔记本电脑；在 NPU 机器上，调用算子的单元格改用内核接受的最小尺寸
# ---

# %% [markdown] tags=["en"]
# **The claim.** For each token, a layer of MLA (multi-head latent attention) caches one *latent* vector and one
# rotated key, shared by all heads. Attention can be computed from that cache in two ways. *Expanded*: rebuild each
# head's keys and values from the latents (the *up-projections*), then attend as usual. *Absorbed*: bring the query into
# latent space, and attend to the latents as they lie in the cache. Both give the same numbers. Their cost differs, so
# engines use the first for prompts and the second for decoding.

# %% [markdown] tags=["zh"] pair="82ba2d-748bf1"
# **要点。** MLA（多头潜变量注意力）的一层，为每个词元只缓存一个*潜变量*（latent）向量和一个做过旋转位置编码（RoPE）的键，所有头共用。
# 从这份缓存出发，注意力有两种算法。*展开式*：先由潜变量还原每个头的键和值（即*上投影*），再做普通的注意力。
# *吸收式*：把查询变换到潜变量空间，直接对缓存里的潜变量做注意力。两种算法结果相同，计算量不同：
# 所以引擎在预填充时用前者，在解码时用后者。

# %% tags=["fold"]
from IPython.display import HTML

LANES = {
    "expanded": ["cache: c, k_rope", "!k = W_UK c,  v = W_UV c", "q · k", "softmax", "weights · v", "out"],
    "absorbed": ["cache: c, k_rope", "!q' = q W_UK", "q' · c", "softmax", "o' = weights · c", "!out = W_UV o'"],
}
parts = []
for lane, (name, steps) in enumerate(LANES.items()):
    x = 2 + lane * 216
    parts.append(f'<text x="{x + 100}" y="16" text-anchor="middle" font-weight="bold">{name}</text>')
    for i, step in enumerate(steps):
        y, thick = 26 + i * 38, 3 if step[0] == "!" else 1
        parts.append(f'<rect x="{x}" y="{y}" width="200" height="28" rx="3" fill-opacity="0.08" stroke="currentColor" '
                     f'stroke-width="{thick}"/><text x="{x + 100}" y="{y + 18}" text-anchor="middle">'
                     f'{step.lstrip("!")}</text>')
        parts.append(f'<path d="M{x + 100} {y + 28}v10" stroke="currentColor"/>' if step is not steps[-1] else "")
caption = ('<span lang="en">Thick boxes: the up-projections. Expanded has them before the attention, absorbed around it.</span>'
           '<span lang="zh">粗框是上投影：展开式在算注意力之前做，吸收式在注意力的前后各做一半。</span>')
HTML(f'<figure class="trueup-picture"><svg viewBox="0 0 420 256" width="420" style="max-width:100%;height:auto" '
     f'role="img" aria-label="MLA: expanded, absorbed" fill="currentColor" font-family="monospace" font-size="13">'
     f'<title>MLA: expanded, absorbed</title>{"".join(parts)}</svg><figcaption>{caption}</figcaption></figure>')

# %% [markdown] tags=["en"]
# ## Both forms by hand
#
# First the sizes. A head's query has two parts: `nope`, without position, and `rope`, rotated by position. On a laptop
# we take numbers that fit on a page, and lengths that differ from axis to axis, so that a mistaken axis shows.

# %% [markdown] tags=["zh"] pair="8391bb-e4aa39"
# ## 亲手写出两种形式
#
# 先定尺寸。一个头的查询分两部分：`nope` 不含位置，`rope` 按位置旋转。在笔记本电脑上，我们取一页纸写得下的数字，
# 并且各轴的长度尽量不同，这样弄错轴时立刻看得出来。

# %%
import torch
import trueup.core
from torch import einsum
from torch.testing import assert_close

npu = trueup.core.load().name == "device"
# N heads, Dn/Dr widths of nope and rope, Dv value width, R latent rank, P page size.
# On an NPU: the smallest sizes that its kernels accept.
N, Dn, Dr, Dv, R, P = (4, 64, 64, 128, 512, 128) if npu else (2, 6, 4, 5, 8, 3)
T, S = 3, 7  # seven tokens are in the cache; the last three of them ask
assert R + Dr < N * (Dn + Dr + Dv)  # cached, against what heads use

# %%
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
c, k_rope = torch.randn(S, R), torch.randn(S, Dr)  # [S, R], [S, Dr]: the cache
q_nope = torch.randn(T, N, Dn)  # [T, N, Dn]
q_rope = torch.randn(T, N, Dr)  # [T, N, Dr]
kv_b = torch.randn(N * (Dn + Dv), R) / R**0.5  # [N*(Dn+Dv), R], as in a checkpoint
scale = (Dn + Dr) ** -0.5
later = torch.arange(S) > torch.arange(S - T, S)[:, None]  # [T, S]: not to be seen
assert later.sum(1).tolist() == [2, 1, 0]

# %% [markdown] tags=["en"]
# A checkpoint stores both up-projections in one matrix, `kv_b_proj`. The rows of one head are together: first its $D_n$
# rows for keys, then its $D_v$ rows for values. So we view it by head, and only then cut.

# %% [markdown] tags=["zh"] pair="50f1ec-8e7fda"
# 检查点把两个上投影存在同一个矩阵 `kv_b_proj` 里。同一个头的行在一起：先是 $D_n$ 行键，再是 $D_v$ 行值。所以要先按头 view，再切开。

# %%
per_head = kv_b.view(N, Dn + Dv, R)  # [N, Dn+Dv, R]
w_uk, w_uv = per_head[:, :Dn], per_head[:, Dn:]  # [N, Dn, R], [N, Dv, R]
head_1 = Dn + Dv  # begins where all rows of head 0 end
assert torch.equal(w_uk[1], kv_b[head_1 : head_1 + Dn])

# %% [markdown] tags=["en"]
# **Expanded.** With $W^{UK}_n$, $W^{UV}_n$ for head $n$:
#
# $$k_{s,n} = W^{UK}_n c_s, \qquad v_{s,n} = W^{UV}_n c_s$$
#
# $$\mathrm{score}_{t,n,s} = \mathrm{scale}\,(q^{nope}_{t,n} \cdot k_{s,n} + q^{rope}_{t,n} \cdot k^{rope}_s)$$
#
# $$\mathrm{out}_{t,n} = \sum_s \mathrm{softmax}(\mathrm{score})_{t,n,s}\, v_{s,n}$$
#
# The letters in `einsum` are the axes in lower case: `t` query row, `s` cached row, `n` head, `r` latent, `d` key
# width, `v` value width.

# %% [markdown] tags=["zh"] pair="ec555c-9685d1"
# **展开式。** 第 $n$ 个头的上投影记为 $W^{UK}_n$ 和 $W^{UV}_n$：
#
# $$k_{s,n} = W^{UK}_n c_s, \qquad v_{s,n} = W^{UV}_n c_s$$
#
# $$\mathrm{score}_{t,n,s} = \mathrm{scale}\,(q^{nope}_{t,n} \cdot k_{s,n} + q^{rope}_{t,n} \cdot k^{rope}_s)$$
#
# $$\mathrm{out}_{t,n} = \sum_s \mathrm{softmax}(\mathrm{score})_{t,n,s}\, v_{s,n}$$
#
# `einsum` 里的字母就是各轴的小写：`t` 查询行，`s` 缓存行，`n` 头，`r` 潜变量，`d` 键宽，`v` 值宽。

# %%
def softmax(score):
    return score.masked_fill(later[:, None], float("-inf")).softmax(-1)  # [T, N, S]


def expanded_by_hand(c, w_uk, w_uv, scale):
    k = einsum("sr,ndr->snd", c, w_uk)  # [S, N, Dn]
    v = einsum("sr,nvr->snv", c, w_uv)  # [S, N, Dv]
    score = einsum("tnd,snd->tns", q_nope, k)  # [T, N, S]
    score += einsum("tnd,sd->tns", q_rope, k_rope)  # [T, N, S]
    return einsum("tns,snv->tnv", softmax(scale * score), v)  # [T, N, Dv]


wanted = expanded_by_hand(c, w_uk, w_uv, scale)  # [T, N, Dv]
assert wanted.shape == (T, N, Dv)

# %% [markdown] tags=["en"]
# **Absorbed.** Move two brackets. Nothing is approximated:
#
# $$q \cdot (W^{UK}_n c_s) = (q\, W^{UK}_n) \cdot c_s$$
#
# $$\sum_s p_s\, (W^{UV}_n c_s) = W^{UV}_n \Big(\sum_s p_s\, c_s\Big)$$
#
# Now no tensor has both an `s` and a head width: keys and values of single heads never exist.

# %% [markdown] tags=["zh"] pair="2a0261-c7bdb4"
# **吸收式。** 移动两处括号，没有任何近似：
#
# $$q \cdot (W^{UK}_n c_s) = (q\, W^{UK}_n) \cdot c_s$$
#
# $$\sum_s p_s\, (W^{UV}_n c_s) = W^{UV}_n \Big(\sum_s p_s\, c_s\Big)$$
#
# 这样一来，没有哪个张量同时带有 `s` 轴和头宽：各个头的键和值根本没有被算出来。

# %%
def absorbed_by_hand(c, w_uk, w_uv, scale):
    q_latent = einsum("tnd,ndr->tnr", q_nope, w_uk)  # [T, N, R]
    score = einsum("tnr,sr->tns", q_latent, c)  # [T, N, S]
    score += einsum("tnd,sd->tns", q_rope, k_rope)  # [T, N, S]
    # The values are the cache itself.
    o_latent = einsum("tns,sr->tnr", softmax(scale * score), c)  # [T, N, R]
    return einsum("tnr,nvr->tnv", o_latent, w_uv)  # [T, N, Dv]


assert_close(absorbed_by_hand(c, w_uk, w_uv, scale), wanted)

# %% [markdown] tags=["en"]
# ## The wrong way: two halves
#
# The classic bug cuts `kv_b_proj` first and views it by head afterwards. All shapes fit.

# %% [markdown] tags=["zh"] pair="011b16-69eb9d"
# ## 错误的做法：先切成两块
#
# 最常见的错误，是先把 `kv_b_proj` 切成前后两块，再各自按头分开。所有形状都对得上。

# %% tags=["raises-exception"] raises="AssertionError" says="not close"
half_uk = kv_b[: N * Dn].view(N, Dn, R)  # [N, Dn, R]
half_uv = kv_b[N * Dn :].view(N, Dv, R)  # [N, Dv, R]
assert_close(absorbed_by_hand(c, half_uk, half_uv, scale), wanted)

# %% [markdown] tags=["en"]
# Why? The rows are stored head by head, keys then values. The first part begins with head 0's key rows, so head 0 has
# right keys; then it runs into head 0's value rows and takes them for keys. Drawn for two heads with three key rows and
# two value rows:

# %% [markdown] tags=["zh"] pair="82ed2c-23b520"
# 为什么？各行是一个头接一个头存的，每个头先键后值。前一块以 0 号头的键行开头，所以 0 号头的键是对的；
# 后面却混进了 0 号头的值行，被当成 1 号头的键。
# 下图画的是两个头、每头三行键和两行值的情形：

# %% tags=["fold"]
from trueup.core.picture import boxes

keys, values = [[f"k{n}{i}" for i in "abc"] for n in "01"], [[f"v{n}{i}" for i in "ab"] for n in "01"]
stored = keys[0] + values[0] + keys[1] + values[1]
taken = keys[0] + keys[1] + values[0] + values[1]
style = ["real" if a == b else "bad" for a, b in zip(stored, taken, strict=True)]
boxes([("stored", stored), ("halves", list(zip(taken, style, strict=True)))],
      ("Rows of kv_b_proj, and what cutting it in halves takes them for (thick: wrongly).",
       "kv_b_proj 的各行，以及先切成两块之后被当成了什么；粗框是当错的。"))

# %%
assert torch.equal(half_uk[0], w_uk[0])  # head 0's keys are right ...
assert not torch.equal(half_uk[1], w_uk[1])  # ... head 1's are not:
few = min(Dn, Dv)
assert torch.equal(half_uk[1][:few], w_uv[0][:few])  # they are values of head 0

# %% [markdown] tags=["en"]
# In this project the cut is made once, at load time, in `trueup/models/receivers.py`.
#
# ## The scale belongs to the head before absorption
#
# In the absorbed call, a query row is $R + D_r$ wide, its two parts together. Its width suggests a scale of
# $1/\sqrt{R + D_r}$. But moving brackets did not change the score, so the scale stays $1/\sqrt{D_n + D_r}$. For
# GLM-4.7-Flash that is 1/16, not 1/24.

# %% [markdown] tags=["zh"] pair="865f8f-5d671a"
# 本项目只在加载权重时切一次，代码在 `trueup/models/receivers.py`。
#
# ## 缩放系数属于吸收之前的头
#
# 在吸收式的调用里，一行查询的两部分合起来宽 $R + D_r$，看上去该用 $1/\sqrt{R + D_r}$。可是移动括号并没有改变分数，
# 所以系数仍是 $1/\sqrt{D_n + D_r}$。对 GLM-4.7-Flash 来说是 1/16，不是 1/24。

# %%
by_query_width = absorbed_by_hand(c, w_uk, w_uv, (R + Dr) ** -0.5)  # [T, N, Dv]
assert (by_query_width - wanted).abs().max() > 0.01
assert (192 + 64) ** -0.5 == 1 / 16 and (512 + 64) ** -0.5 == 1 / 24

# %% [markdown] tags=["en"]
# The wrong scale raises no error and makes attention flatter. No operator can check it.
#
# ## Why prompts use one form and decoding the other
#
# Count multiplications of one layer, for `q` query rows that all see `S` cached tokens (a causal prompt needs about
# half of the pairs, in both forms alike).

# %% [markdown] tags=["zh"] pair="b28df5-e5ad78"
# 系数错了不会报错，只会让注意力分布变平。没有哪个算子能查出来，因为它看不到 $D_n$。
#
# ## 为什么预填充用一种，解码用另一种
#
# 数一数一层的乘法次数：`q` 行查询，每行都看到 `S` 个缓存词元（提示词带因果掩码时，只需算约一半的查询-键对，两种形式都一样）。

# %%
GLM = {"N": 20, "Dn": 192, "Dr": 64, "Dv": 256, "R": 512}


def expanded_cost(q, S, N, Dn, Dr, Dv, R):
    rebuild = S * N * R * (Dn + Dv)  # keys and values of every cached token
    return rebuild + q * S * N * (Dn + Dr + Dv)  # scores and weighted sums, 512 wide


def absorbed_cost(q, S, N, Dn, Dr, Dv, R):
    project = q * N * R * (Dn + Dv)  # the same up-projections, but of query rows
    return project + q * S * N * (R + Dr + R)  # scores and weighted sums, 1,088 wide


def cached_bytes(S, N, Dn, Dr, Dv, R):  # bf16: keys and values of each head; latents
    return S * N * (Dn + Dr + Dv) * 2, S * (R + Dr) * 2


decode, prompt = (1, 8192), (8192, 8192)  # q, S
assert expanded_cost(*decode, **GLM) > 200 * absorbed_cost(*decode, **GLM)
assert absorbed_cost(*prompt, **GLM) > 2 * expanded_cost(*prompt, **GLM)
assert cached_bytes(1, **GLM) == (20_480, 1_152)

# %% [markdown] tags=["en"]
# For a prompt, `q = S`: both forms project as many rows, and then each pair of query and key costs a head 512
# multiplications expanded and 1,088 absorbed. For decoding, `q = 1`: expanded would rebuild the keys of the whole
# context for one row. It could keep them instead, but then every step reads about 18 times the bytes. The plots show
# both.

# %% [markdown] tags=["zh"] pair="b2cdfc-c58871"
# 预填充时 `q = S`：两种形式投影的行数一样多；此后每一对查询和键，每个头上展开式花 512 次乘法，吸收式花 1,088 次。
# 解码时 `q = 1`：展开式要为一行查询还原整个上下文的键和值。当然也可以把还原出来的键和值存下来，
# 但那样每一步要读约 18 倍的字节。下图画出计算量和字节数。

# %% tags=["fold"]
from math import log10

contexts = [2**i for i in range(7, 18)]
panels = [
    ("decode: mult.", [(expanded_cost(1, s, **GLM), absorbed_cost(1, s, **GLM)) for s in contexts]),
    ("prompt: mult.", [(expanded_cost(s, s, **GLM), absorbed_cost(s, s, **GLM)) for s in contexts]),
    ("decode: bytes", [cached_bytes(s, **GLM) for s in contexts]),
]
parts = []
for i, (title, rows) in enumerate(panels):
    x, low, high = 34 + i * 160, int(log10(min(map(min, rows)))), int(log10(max(map(max, rows)))) + 1
    parts.append(f'<rect x="{x}" y="24" width="116" height="120" fill="none" stroke="currentColor" opacity="0.4"/>'
                 f'<text x="{x + 58}" y="16" text-anchor="middle">{title}</text>'
                 f'<text x="{x + 58}" y="158" text-anchor="middle" font-size="10">128 ... 131,072 tokens</text>')
    for value, y in ((high, 32), (low, 144)):
        parts.append(f'<text x="{x - 4}" y="{y}" text-anchor="end" font-size="10">1e{value}</text>')
    for form, dash in ((0, "5 4"), (1, "none")):
        line = " ".join(f"{x + j * 11.6:.0f},{144 - 120 * (log10(row[form]) - low) / (high - low):.1f}"
                        for j, row in enumerate(rows))
        parts.append(f'<polyline points="{line}" fill="none" stroke="currentColor" stroke-width="2" '
                     f'stroke-dasharray="{dash}"/>')
caption = ('<span lang="en">Dashed: expanded; solid: absorbed. GLM-4.7-Flash, one layer, log scales.</span>'
           '<span lang="zh">虚线为展开式，实线为吸收式。GLM-4.7-Flash 的一层，对数坐标。</span>')
HTML(f'<figure class="trueup-picture"><svg viewBox="0 0 480 164" width="480" style="max-width:100%;height:auto" '
     f'role="img" aria-label="expanded, absorbed" fill="currentColor" font-size="12"><title>expanded, absorbed</title>{"".join(parts)}</svg><figcaption>{caption}</figcaption></figure>')

# %% [markdown] tags=["en"]
# ## The right way: the operators
#
# `trueup.core.attention` has one function per form. `absorbed` reads pages, `expanded` takes latents. We write our
# seven tokens to a paged cache and ask for the last three both ways: as a *verify* segment, several query rows of a
# request that decodes (absorbed), and as a prompt chunk after four cached tokens (expanded).

# %% [markdown] tags=["zh"] pair="f6b908-33901d"
# ## 正确的做法：调用算子
#
# `trueup.core.attention` 里每种形式一个函数：`absorbed` 读页，`expanded` 接收潜变量。
# 我们把七个词元写进分页缓存，然后用两种方式算最后三个词元的注意力：一次作为*验证*段（verify，解码中的请求一次带几行查询，吸收式）；
# 一次作为接在四个已缓存词元后面的提示词分块（展开式）。

# %%
from trueup.core.cache import CacheSpec, Pools
from trueup.core.layout import Mode
from trueup.core.pages import PagePool
from trueup.core.planning import Work, plan
from trueup.core.view import materialise

device, dtype = ("npu", torch.bfloat16) if npu else ("cpu", torch.float64)
rules, tol = ("device", 2e-2) if npu else ("paper", 1e-6)  # the profile of chapter 4
pool = PagePool(5, P)
pages = pool.allocate(pool.pages_for(S))
pools = Pools(CacheSpec(1, R, Dr, dtype, torch.device(device)), pool)


def segment(mode):
    work = Work(request=0, mode=mode, start=S - T, length=T, pages=pages)
    return materialise(plan([work], page_size=P), pools).segments[0]


verify, chunk = segment(Mode.VERIFY), segment(Mode.PREFILL)
slots = torch.cat([chunk.prefix_slots, chunk.slots])  # [S]
pools.latent[0].view(-1, R)[slots] = c.to(device, dtype)
pools.rope[0].view(-1, Dr)[slots] = k_rope.to(device, dtype)
assert (verify.kv_lens, chunk.prefix_cum, chunk.q_cum) == ([S], [S - T], [T])

# %%
from trueup.core.attention.absorbed import absorbed
from trueup.core.attention.expanded import expanded
from trueup.core.ops.contract import profile


def same(got, expected):
    assert_close(got.cpu().double(), expected, atol=tol, rtol=tol)


q = q_nope.to(device, dtype), q_rope.to(device, dtype)  # [T, N, Dn], [T, N, Dr]
w = w_uk.to(device, dtype), w_uv.mT.to(device, dtype)  # [N, Dn, R], [N, R, Dv]
new = pools.gather(0, chunk.slots)  # [T, R], [T, Dr]
prefix = pools.gather(0, chunk.prefix_slots)  # [S-T, R], [S-T, Dr]
with profile(rules):
    same(absorbed(*q, *w, scale, verify, *pools.paged(0)), wanted)
    same(expanded(*q, *w, scale, chunk, new, prefix), wanted)

# %% [markdown] tags=["en"]
# `expanded` made two attention calls: the chunk against itself, causal, and the chunk against the prefix, where every
# key is visible. Each also returns the log of its softmax denominator, its *log-sum-exp* $\ell$. One softmax over all
# keys is the weighted mean of the two: $\mathrm{out} = \sum_i e^{\ell_i - \ell}\, \mathrm{out}_i$ with
# $\ell = \ln \sum_i e^{\ell_i}$. `npu_attention_update` computes it.

# %% [markdown] tags=["zh"] pair="7c5ffc-3e63eb"
# `expanded` 做了两次注意力调用：分块对自己，带因果掩码；分块对前缀，所有键都可见。每次调用还返回 softmax 分母的对数，
# 即 *log-sum-exp* $\ell$。对全部键做一次 softmax，等于两次结果的加权平均：
# $\mathrm{out} = \sum_i e^{\ell_i - \ell}\, \mathrm{out}_i$，其中 $\ell = \ln \sum_i e^{\ell_i}$。
# `npu_attention_update` 算的就是它。

# %%
k = einsum("sr,ndr->snd", c, w_uk)  # [S, N, Dn]
v = einsum("sr,nvr->snv", c, w_uv)  # [S, N, Dv]
score = einsum("tnd,snd->tns", q_nope, k)  # [T, N, S]
score += einsum("tnd,sd->tns", q_rope, k_rope)  # [T, N, S]
score = (scale * score).masked_fill(later[:, None], float("-inf"))  # [T, N, S]


def part(keys):
    """Log-sum-exp and output of some of the keys, rows and heads flattened."""
    lse = score[..., keys].logsumexp(-1)  # [T, N]
    out = einsum("tns,snv->tnv", score[..., keys].softmax(-1), v[keys])  # [T, N, Dv]
    lse, out = lse.flatten(), out.flatten(0, 1)  # [T*N], [T*N, Dv]
    return lse.to(device, torch.float32), out.to(device, dtype)


def merged(*parts):
    lse, out = map(list, zip(*parts, strict=True))
    with profile(rules):
        total, _ = torch.ops.npu.npu_attention_update(lse, out, 0)  # [T*N, Dv]
    return total.view(T, N, Dv)  # [T, N, Dv]


same(merged(part(slice(0, S - T)), part(slice(S - T, S))), wanted)

# %% [markdown] tags=["en"]
# ## Which call is legal
#
# The head widths decide how the expanded form may be handed to `npu_fused_infer_attention_score_v2`. `TND` packs all
# requests' rows into one tensor `[T, N, D]`; `BSND` is `[B, S, N, D]`, with S rows for each of B requests.
#
# | model | nope | rope | value | form |
# |---|---|---|---|---|
# | DeepSeek-V3.2 | 128 | 64 | 128 | `TND`, rope as an argument of its own |
# | the nano model | 64 | 64 | 128 | `TND`, nope and rope concatenated: 128 |
# | GLM-4.7-Flash | 192 | 64 | 256 | `BSND`, one call a request: `TND` refuses width 256 |

# %% [markdown] tags=["zh"] pair="04a3a7-ad7c2e"
# ## 哪种调用合法
#
# 展开式怎样交给 `npu_fused_infer_attention_score_v2`，由头宽决定。`TND` 把所有请求的行拼成一个 `[T, N, D]` 张量；
# `BSND` 是 `[B, S, N, D]`，B 个请求各有 S 行。
#
# | 模型 | nope | rope | value | 形式 |
# |---|---|---|---|---|
# | DeepSeek-V3.2 | 128 | 64 | 128 | `TND`，rope 作为单独的参数 |
# | nano 模型 | 64 | 64 | 128 | `TND`，nope 与 rope 拼接：128 |
# | GLM-4.7-Flash | 192 | 64 | 256 | `BSND`，每个请求一次调用：`TND` 拒绝宽度 256 |

# %%
from trueup.core.attention.expanded import expanded_form

attention = torch.ops.npu.npu_fused_infer_attention_score_v2
assert expanded_form(nope=128, rope=64, v=128).name == "TND_ROPE"
assert expanded_form(nope=64, rope=64, v=128).name == "TND_CONCAT"
assert expanded_form(nope=192, rope=64, v=256).name == "BSND_CONCAT"

# %% tags=["raises-exception"] raises="ContractError" says="layout BSND"
x = torch.zeros(T, 20, 256, dtype=torch.bfloat16, device=device)  # [T, N, D]
attention(x, x, x, num_query_heads=20, softmax_scale=1 / 16, input_layout="TND",
          actual_seq_qlen=[T], actual_seq_kvlen=[T])

# %% [markdown] tags=["en"]
# Absorbed, all three models look alike: one key head, width $R$ = 512, rope 64. There only the head count is
# restricted, and that is the next story.
#
# ## SB-06: twenty heads
#
# GLM-4.7-Flash has 20 heads. In the absorbed call, the operator takes powers of two only. (`TND_NTD` in it means:
# query `[T, N, D]`, output heads first, `[N, T, D]`.)

# %% [markdown] tags=["zh"] pair="910632-e21dea"
# 换成吸收式，三个模型就都一样了：只有一个键头，宽度 $R$ = 512，rope 64。这时受限制的只有头数，下一节就讲它。
#
# ## SB-06：二十个头
#
# GLM-4.7-Flash 有 20 个头。吸收式调用里，算子只接受 2 的幂个头。
# （下面代码里 `TND_NTD` 的意思是：查询为 `[T, N, D]`，输出把头放在最前，即 `[N, T, D]`。）

# %% tags=["raises-exception"] raises="ContractError" says="SB-06"
bf16 = {"dtype": torch.bfloat16, "device": device}
query, query_rope = torch.zeros(1, 20, 512, **bf16), torch.zeros(1, 20, 64, **bf16)
latent, rope = torch.zeros(2, 128, 512, **bf16), torch.zeros(2, 128, 64, **bf16)
table = torch.ones(1, 1, dtype=torch.int32, device=device)  # [B, pages a request]
attention(query, latent, latent, query_rope=query_rope, key_rope=rope,
          num_query_heads=20, num_key_value_heads=1, softmax_scale=1 / 16,
          input_layout="TND_NTD", actual_seq_qlen=[1], actual_seq_kvlen=[1],
          block_size=128, block_table=table)

# %% [markdown] tags=["en"]
# So the query gets extra heads after its real ones: 20 to 32, or, with the heads spread over two or four ranks, 10 to
# 16 and 5 to 8. In the first versions of this padding in sglang (PRs #21408 and #28516) the extra heads were memory
# that nobody had written. Zeros were proposed in review; the merged code kept the unwritten memory.
#
# Does it matter what they hold? We *poison* them: five heads become eight, and the three extra ones hold zeros, then
# NaN, then 1e30.

# %% [markdown] tags=["zh"] pair="eed7f9-2eac73"
# 于是要在真实的头后面填充若干个头：20 填到 32；头分到两张或四张卡上时，10 填到 16，5 填到 8。
# sglang 最初的填充（PR #21408 和 #28516）里，多出来的头是未初始化的内存。
# 评审中有人建议清零，合入的代码仍旧用未初始化的内存。
#
# 里面装的是什么，要紧吗？我们往里*投毒*：五个头填到八个，多出的三个先放零，再放 NaN，再放 1e30。

# %%
five = torch.randn(T, 5, R)  # [T, N, R]: queries in latent space
five_rope = torch.randn(T, 5, Dr)  # [T, N, Dr]
latent, rope = pools.paged(0)  # [pages, P, R], [pages, P, Dr]


def filled(x, value):
    return torch.cat([x, x.new_full((T, 3, x.shape[2]), value)], 1)  # [T, Np, D]


def run(value):
    query = filled(five, value).to(device, dtype)  # [T, Np, R]
    query_rope = filled(five_rope, value).to(device, dtype)  # [T, Np, Dr]
    with profile(rules):
        out, _ = attention(
            query, latent, latent, query_rope=query_rope, key_rope=rope,
            num_query_heads=8, num_key_value_heads=1, softmax_scale=scale,
            input_layout="TND_NTD", sparse_mode=3, atten_mask=verify.mask,
            actual_seq_qlen=verify.q_cum, actual_seq_kvlen=verify.kv_lens,
            block_size=P, block_table=verify.block_table)  # [Np, T, R]
    return out.cpu()


# %%
zeros, nans, huge = run(0.0), run(float("nan")), run(1e30)  # [Np, T, R] each
assert torch.equal(zeros[:5], nans[:5])  # of the real heads not one bit differs
assert torch.equal(zeros[:5], huge[:5])

five_score = einsum("tnr,sr->tns", five, c)  # [T, N, S]
five_score += einsum("tnd,sd->tns", five_rope, k_rope)  # [T, N, S]
unpadded = einsum("tns,sr->ntr", softmax(scale * five_score), c)  # [N, T, R]
same(zeros[:5], unpadded)

# %% [markdown] tags=["en"]
# Heads never meet inside attention, so the real ones are safe. The padded ones are another matter:

# %% [markdown] tags=["zh"] pair="64e3f5-1cc0fc"
# 注意力内部，头与头互不相干，所以真实的头是安全的。填充头就不一样了：

# %%
assert not nans[5:].isfinite().any()  # NaN in, NaN out
means = torch.stack([c[: S - T + t + 1].mean(0) for t in range(T)])  # [T, R]
same(zeros[5:], means.expand(3, T, R))  # zero query, equal weights: a mean of latents


def largest(x):  # a reduction over heads, as a quantisation scale is
    return x.abs().amax((1, 2))  # [T]


assert torch.equal(largest(filled(five, 0.0)), largest(five))  # zeros leave it alone
assert largest(filled(five, float("nan"))).isnan().all()  # NaN ends it
assert (largest(filled(five, 1e30)) == 1e30).all()  # 1e30 drowns it

# %% [markdown] tags=["en"]
# Unwritten memory may hold any of these. In a fresh process it is often zero, so a short run looks right. But NaN sets
# off the checks one uses to find real trouble, the dumps of two runs differ, and a kernel that reduces over heads turns
# junk into wrong answers. So trueup pads with zeros, in one function (`pad_heads`), and cuts the extra heads off before
# the value up-projection. vllm-ascend does so too (`vllm_ascend/attention/mla_v1.py`). Whether a device's kernel keeps
# heads apart as ours does is an open question, [`head-padding`](../what-ran-where.md#only-a-device).

# %% [markdown] tags=["zh"] pair="aefe48-782649"
# 没写过的内存可能是其中任何一种，而进程刚启动时它往往是零，所以短时间运行看不出问题。
# NaN 会触发本来用于定位真问题的数值检查，两次运行转储（dump）的张量对不上；一旦某个内核跨头归约，垃圾就变成错误答案。
# 因此 trueup 填零，只在一个函数（`pad_heads`）里做，并在值的上投影之前把多出的头切掉。
# vllm-ascend 也是这样（`vllm_ascend/attention/mla_v1.py`）。设备内核是否和我们的一样让头与头互不相干，
# 还有待设备来回答：[`head-padding`](../what-ran-where.md#only-a-device)。

# %%
from trueup.core.attention.absorbed import pad_heads, padded_heads

assert [padded_heads(n) for n in (20, 10, 5)] == [32, 16, 8]
assert all(padded_heads(n) == n for n in (1, 2, 4, 8, 16, 32, 64, 128))
assert torch.equal(pad_heads(five), filled(five, 0.0))

# %% [markdown] tags=["en"]
# The nano model has five heads, so it meets all of this. The *ledger* records each operator call of a running engine:
# here the attention calls of one layer, for the second chunk of a prompt (expanded, against itself and against the
# prefix) and for one decoded token (absorbed). In its tables `G` counts key heads and `S` key rows.

# %% [markdown] tags=["zh"] pair="b5af30-79ef98"
# nano 模型有五个头，所以上面这些它全都会遇到。*账本*（ledger）记录引擎运行中的每一次算子调用。
# 下面是其中一层的注意力调用：先是提示词的第二个分块（展开式，对自己、对前缀各一次），再是解码一个词元（吸收式）。
# 表中 `G` 是键头数，`S` 是键的行数。

# %%
from trueup.core import ledger
from trueup.core.engine import Engine, EngineConfig
from trueup.core.sampling import SamplingParams
from trueup.models import load_model

model = load_model("glm-4.7-flash-nano", progress=False)
engine = Engine(model, EngineConfig(num_pages=3, prefill_tokens=4))
engine.add([5, 6, 7, 8, 9, 10], SamplingParams(max_tokens=2, ignore_eos=True))
with ledger.record(engine) as led:
    while engine.has_work:
        engine.step()
calls = led.only(owner="layers.0.attention", operator="npu_fused")
# One call for the first chunk, two for a chunk behind a prefix, one for a token.
assert [len(step.calls) for step in calls.rounds] == [1, 2, 1]
query = calls.rounds[2].calls[0].operands[0]  # [T, Np, R]: five heads became eight
assert [axis.size for axis in query.axes] == [1, 8, 512]
ledger.Ledger(calls.rounds[1:])

# %% [markdown] tags=["en"]
# ## SB-27: a scale that one side misses
#
# Some checkpoints scale the latent. Say the true latent is $1.7\,c$ while the cache holds $c$. Keys and values both
# come from the latent, so the factor belongs in **two** places. In one of the CANN inference recipes the absorbed path
# had it on the query side only (cann-recipes-infer, merge request !621). Short outputs looked fine; greedy decoding
# fell into a loop after a few hundred tokens.

# %% [markdown] tags=["zh"] pair="e58055-b74058"
# ## SB-27：一侧漏掉的缩放
#
# 有些检查点会缩放潜变量。设真正的潜变量是 $1.7\,c$，而缓存里放的是 $c$。
# 键和值都来自潜变量，所以这个系数要出现在**两处**。
# CANN（昇腾的软件栈）有一份推理样例，其中吸收式只在查询一侧乘了它（cann-recipes-infer，合并请求 !621）：
# 短输出看着正常，贪心解码几百个词元之后陷入循环。

# %% tags=["raises-exception"] raises="AssertionError" says="not close"
true_latent = expanded_by_hand(1.7 * c, w_uk, w_uv, scale)  # [T, N, Dv]
query_side_only = absorbed_by_hand(c, 1.7 * w_uk, w_uv, scale)  # [T, N, Dv]
assert_close(query_side_only, true_latent)

# %%
both_sides = absorbed_by_hand(c, 1.7 * w_uk, 1.7 * w_uv, scale)  # [T, N, Dv]
assert_close(both_sides, true_latent)
assert_close(1.7 * query_side_only, true_latent)  # the right direction, but too short

# %% [markdown] tags=["en"]
# The weights of the softmax were right, and each output pointed the right way. That is why it hid. The rule: list each
# scale once, with every side it belongs to, and compare the forms on the last prompt token.
#
# | scale | key side | value side |
# |---|---|---|
# | softmax, $1/\sqrt{D_n + D_r}$ | whole score | - |
# | factor on the latent | into $W^{UK}$ | into $W^{UV}$ |
# | factor on rope | rope part | - |
#
# ## What engines do
#
# - sglang: expanded for prompts; absorbed for decoding and for the passes of speculation. At width 256 it joins prefix
#   and chunk and makes one causal `BSND` call a request
#   (`python/sglang/srt/hardware_backend/npu/attention/ascend_backend.py`).
# - vllm-ascend: the same split; prefix windows merged by log-sum-exp (`vllm_ascend/attention/mla_v1.py`).
# - trueup merges at every width, and its absorbed call takes at most 16 query rows a request, as the operator does.
#
# In bf16 the two forms round differently. A tie between two tokens can go the other way; that is no bug.

# %% [markdown] tags=["zh"] pair="20cafb-a035cc"
# softmax 的权重是对的，每个输出的方向也是对的，所以它藏得住。规则是：每个缩放只列一次，写明它属于哪几侧；
# 再用提示词的最后一个词元对比两种形式。
#
# | 缩放 | 键一侧 | 值一侧 |
# |---|---|---|
# | softmax 的 $1/\sqrt{D_n + D_r}$ | 整个分数 | - |
# | 潜变量的系数 | 并入 $W^{UK}$ | 并入 $W^{UV}$ |
# | rope 的系数 | rope 部分 | - |
#
# ## 真实引擎怎么做
#
# - sglang：预填充用展开式；解码和投机解码的各个阶段用吸收式。头宽 256 时，它把前缀和分块拼起来，
#   每个请求做一次因果的 `BSND` 调用，
#   见 `python/sglang/srt/hardware_backend/npu/attention/ascend_backend.py`。
# - vllm-ascend：两种形式的分工相同；前缀分窗口计算，再按 log-sum-exp 合并（`vllm_ascend/attention/mla_v1.py`）。
# - trueup 在任何宽度下都做合并；吸收式调用每个请求最多 16 行查询，这是算子的上限。
#
# bf16 下两种形式的舍入不同，两个词元分数几乎相等时，可能选出另一个，这不是缺陷。

# %% [markdown] tags=["en"]
# ## Exercises
#
# **1.** A chunk of `q` query rows comes after a long prefix. Up to which `q` does the absorbed form need fewer
# multiplications, for GLM-4.7-Flash with 32,768 cached tokens?

# %% [markdown] tags=["zh"] pair="35f8a5-6b2220"
# ## 练习
#
# **1.** 很长的前缀后面有一个 `q` 行的分块。对 GLM-4.7-Flash、缓存 32,768 个词元，`q` 不超过多少时吸收式的乘法更少？

# %% tags=["solution"]
S_long = 32_768
fewer = [q for q in range(1, 1000)
         if absorbed_cost(q, S_long, **GLM) < expanded_cost(q, S_long, **GLM)]
assert fewer == list(range(1, 394))
assert round(512 * (192 + 256) / 576) == 398  # where it tends to as the prefix grows

# %% [markdown] tags=["en"]
# **2.** Merge three parts of the keys (0 to 1, 2 to 3, 4 to 6) instead of two.

# %% [markdown] tags=["zh"] pair="64426d-71a891"
# **2.** 把键分成三段（0 到 1、2 到 3、4 到 6）再合并。

# %% tags=["solution"]
same(merged(part(slice(0, 2)), part(slice(2, 4)), part(slice(4, 7))), wanted)

# %% [markdown] tags=["en"]
# **3.** What share of the absorbed attention of GLM-4.7-Flash is spent on padded heads, on one, two and four ranks? And
# for DeepSeek-V3.2 with its 128 heads?

# %% [markdown] tags=["zh"] pair="fd9ebb-eed81b"
# **3.** GLM-4.7-Flash 的吸收式注意力，在一张、两张、四张卡上，各有多大比例花在填充头上？128 个头的 DeepSeek-V3.2 呢？

# %% tags=["solution"]
share = {heads: 1 - heads / padded_heads(heads) for heads in (20, 10, 5, 128)}
assert share == {20: 0.375, 10: 0.375, 5: 0.375, 128: 0.0}

# %% [markdown] tags=["en"]
# ## On an NPU machine
#
# Run all cells. The first code cell sees the device and takes sizes its kernels accept (latent 512, rope 64, nope 64,
# value 128, pages of 128); the operator cells then run in bf16, with a tolerance to match. The two calls that are
# refused above reach the device unchecked: by the sources that our messages cite, it refuses them, too, with an error
# of its own. No device has run this chapter; with `device` swapped for the CPU, that branch has been run under the
# `device` profile. See [what ran where](../what-ran-where.md).

# %% [markdown] tags=["zh"] pair="2e6b90-49f0ed"
# ## 在 NPU 机器上
#
# 运行全部单元格即可。开头的代码检测到设备后，改用内核接受的尺寸（潜变量 512、rope 64、nope 64、value 128、页大小 128），
# 调用算子的单元格以 bf16 运行，容差相应放宽。上面被契约拒绝的两个调用，这时不经检查就到了设备：
# 按报错消息里引用的出处，设备同样会拒绝，只是报出它自己的错误。
# 本章还没有在任何设备上运行过；把代码中的 `device` 变量换成 CPU 后，这条分支在 `device` 配置档下运行过。
# 参见[哪些在哪里跑过](../what-ran-where.md)。
