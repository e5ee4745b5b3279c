# ---
# title:
#   en: "15. Train an indexer"
#   zh: "15. 训练一个索引器"
# outcome:
#   en: "a dense model made sparse in half a minute by an indexer that you trained, and the reasons behind each step"
#   zh: "亲手训练一个索引器，半分钟把稠密模型变成稀疏模型，并说得清每一步的理由"
# minutes: 18
# prerequisites:
#   en: "[chapter 13](ch13_sparse.md) (indexer and sparse attention); gradients in PyTorch"
#   zh: "[第 13 章](ch13_sparse.md)（索引器与稀疏注意力）；PyTorch 里的梯度"
# bugs: []
# hardware:
#   en: any laptop; training needs no NPU
#   zh: 任何笔记本电脑；训练不需要 NPU
# ---

# %% [markdown] tags=["en"]
# **The claim.** A model need not be trained sparse from the beginning. A finished dense model becomes a sparse one if each
# of its layers gets an indexer, and the indexer learns where that layer's attention goes. Nobody has to label anything:
# the dense attention is the teacher. On the small model below this takes half a minute. The 32 positions of 256 that an
# untrained indexer chooses hold about a third of the attention, or less, and the loss goes up by more than half.
# Afterwards they hold more than three quarters, and the loss is within a few percent of the dense model's.
#
# ## What there is to learn
#
# Take one row that sees four positions, and two heads. All heads of a layer share one choice, so what counts is where
# they look *together*: add the heads up, and normalise. That is the *target*. Each head's row sums to one, so it is also
# the mean over heads. The indexer's *guess* is the softmax of its scores.

# %% [markdown] tags=["zh"] pair="926cb7-76d58a"
# **要点。** 稀疏模型不必从头按稀疏的方式训练。拿一个训练好的稠密模型，给每一层配一个索引器，让它学会这一层的注意力都看向哪里，
# 模型就能改成稀疏的。不用人工标注：稠密注意力就是老师。下面的小模型上，半分钟就能做完。
# 未经训练的索引器从 256 个位置里选 32 个，只占注意力的三分之一左右，甚至更少，损失上升一半以上；
# 训练之后能占到四分之三以上，损失与稠密模型只差百分之几。
#
# ## 要学的是什么
#
# 取一行，看得到四个位置，有两个头。一层里所有的头共用一份选择，所以要紧的是它们*合起来*看哪里：把各头相加，再归一化，就是*目标*。
# 每个头的一行加起来等于一，所以它也就是各头的平均。索引器的*猜测*，是它的得分做 softmax。

# %%
from trueup.core.picture import boxes
import torch

torch.set_num_threads(1)
heads = torch.tensor([[0.7, 0.1, 0.1, 0.1],
                      [0.1, 0.1, 0.7, 0.1]])  # [N, T]: the row, by head
target = heads.sum(0) / heads.sum()  # [T]
guess = torch.tensor([0.1, 0.4, 0.2, 0.3])  # [T]: softmax of the scores
assert torch.allclose(target, torch.tensor([0.4, 0.1, 0.4, 0.1]))
assert torch.allclose(target, heads.mean(0))

# %% tags=["fold"]
def row(label, values, picked=range(4)):
    styles = ["real" if i in picked else "pad" for i in range(4)]
    pairs = zip(values.tolist(), styles, strict=True)
    return label, [(f"{value:.1f}", style) for value, style in pairs]


boxes([row("head 1", heads[0]), row("head 2", heads[1]),
       row("target", target, (0, 2)), row("guess", guess, (1, 3))],
      ("Solid in the last two rows: the best two. With K = 2 this guess chooses wrongly.",
       "后两行里，实线框是最大的两个。K = 2 时，照这个猜测会选错位置。"))

# %% [markdown] tags=["en"]
# How far the guess is from the target is measured by the Kullback-Leibler divergence, KL for short:
#
# $$ D(p \,\|\, g) = \sum_s p_s \ln \frac{p_s}{g_s} $$
#
# Its gradient with respect to the scores is guess minus target. So a step downhill raises what gets less than attention
# gives it, and lowers the rest:

# %% [markdown] tags=["zh"] pair="32fb6e-cd896e"
# 猜测离目标有多远，用 Kullback-Leibler 散度（KL 散度）来量：
#
# $$ D(p \,\|\, g) = \sum_s p_s \ln \frac{p_s}{g_s} $$
#
# 它对得分的梯度，就是猜测减目标。所以顺着下降方向走一步，猜得比注意力少的位置，得分升高；猜得多的，得分降低：

# %%
from math import log

from trueup.models.training.indexer_twin import chosen, divergence

scores = guess.log().requires_grad_()  # [T]
loss = divergence(target, scores)
by_hand = 0.4 * log(4) + 0.1 * log(1 / 4) + 0.4 * log(2) + 0.1 * log(1 / 3)
assert abs(loss.item() - by_hand) < 1e-6 and round(by_hand, 2) == 0.58

loss.backward()
assert torch.allclose(scores.grad, guess - target, atol=1e-6)

before = chosen(scores, 2)  # [T] bool
after = chosen(scores - 3 * scores.grad, 2)  # [T] bool
assert before.tolist() == [False, True, False, True]
assert after.tolist() == [True, False, True, False]
assert (target * after).sum() > 0.79 and (target * before).sum() < 0.21

# %% [markdown] tags=["en"]
# The share of the target that the choice holds is its *recall*: 0.2 before the step, 0.8 after it.
#
# ## No gradient comes through a choice
#
# Why this detour? Could the model's own loss not teach the indexer?

# %% [markdown] tags=["zh"] pair="585962-727fa7"
# 选中的位置占目标的份额，就是*召回率*（recall）：走这一步之前是 0.2，之后是 0.8。
#
# ## 梯度穿不过“选”
#
# 为什么要绕这个弯？模型自己的损失，不能直接教索引器吗？

# %% tags=["raises-exception"] raises="RuntimeError" says="does not require grad"
held = (target * chosen(scores, 2)).sum()  # []
held.backward()

# %% [markdown] tags=["en"]
# A choice is yes or no. Move a score a little, and nothing changes; move it past another, and the result jumps. There is
# no slope to follow. The KL needs none: it compares scores *before* the choice. When the model runs, only their
# order matters.
#
# ## Two stages
#
# DeepSeek-V3.2 was made in this way from a finished model (section 2.1.1 of its paper), in two stages:
#
# | | dense warm-up | sparse training |
# |---|---|---|
# | attention sees | everything | the K = 2,048 chosen positions |
# | the indexer's target | attention over all positions | attention over the chosen positions |
# | the rest of the model | frozen | learns from its own loss, the language model's |
# | steps, tokens | 1,000; 2.1 billion | 15,000; 943.7 billion |
# | learning rate | $10^{-3}$ | $7.3 \cdot 10^{-6}$ |
#
# In the second, too, the model learns nothing from the KL: the indexer's input is *detached*. Else the KL would bend the
# model towards attention that is easier to guess.
#
# Why not begin with the second? It is a chicken-and-egg problem. Without a good choice the model sees rubbish, and its own
# loss would change it to live with rubbish. And the indexer would be taught by that choice, too. Here it has chosen the
# wrong half:

# %% [markdown] tags=["zh"] pair="481df3-63083a"
# 选就是“要”或“不要”。得分稍微动一点，什么也不变；一旦越过另一个得分，结果又突然跳变。没有坡度可循。
# KL 散度用不着它：它比较的是选*之前*的得分。真正运行模型时，要紧的只是得分的次序。
#
# ## 两个阶段
#
# DeepSeek-V3.2 就是这样从一个现成的模型改出来的（论文 2.1.1 节），分两个阶段：
#
# | | 稠密预热（dense warm-up） | 稀疏训练（sparse training） |
# |---|---|---|
# | 注意力看什么 | 全部位置 | 选中的 K = 2,048 个位置 |
# | 索引器的目标 | 全部位置上的注意力 | 选中位置上的注意力 |
# | 模型的其余部分 | 冻结 | 按自己的语言模型损失学习 |
# | 步数，词元数 | 1,000；21 亿 | 15,000；9437 亿 |
# | 学习率 | $10^{-3}$ | $7.3 \cdot 10^{-6}$ |
#
# 第二阶段里，模型同样不从 KL 散度学任何东西：索引器的输入做了 detach。否则 KL 散度会把模型的注意力往容易猜的方向拽。
#
# 为什么不直接做第二阶段？这是先有鸡还是先有蛋的问题。选得不好，模型看到的就是一堆没用的东西，
# 它自己的损失会把它改成适应这堆东西的样子；而索引器学的，也正是由这样的选择定下的目标。下面这个例子里，它恰好选中了错的那一半：

# %%
from math import inf

target = torch.tensor([0.1, 0.1, 0.4, 0.4])  # [T]
scores = torch.tensor([1.0, 1.0, 0.0, 0.0], requires_grad=True)  # [T]
picked = chosen(scores, 2)  # [T] bool
assert picked.tolist() == [True, True, False, False]
assert (target * picked).sum() < 0.21

inside = target * picked / (target * picked).sum()  # [T]: attention over the chosen
loss = divergence(inside, scores.masked_fill(~picked, -inf))
(gradient,) = torch.autograd.grad(loss, scores)  # [T]
assert loss.abs() < 1e-6 and gradient.abs().max() < 1e-6

(gradient,) = torch.autograd.grad(divergence(target, scores), scores)  # [T]
assert (gradient[2:] < -0.2).all()

# %% [markdown] tags=["en"]
# Over the chosen positions the loss is zero: guess and attention agree, and nothing says that four fifths of the attention
# lie elsewhere. Over all positions the gradient says it at once. So the first stage looks everywhere, which costs much,
# but is short. The second only has to keep a good choice good, while the model gets used to it.
#
# ## Train one
#
# The teacher is `glm-4.7-flash-nano`, which is dense. Each of its three layers, and the MTP layer, gets a fresh indexer
# of the sizes that `glm-5-nano` has: 16 heads of width 128. We train on windows of T = 256 tokens with K = 32. trueup's
# operators have no backward, so training runs a *twin* of the model: plain PyTorch, with parameters in a dictionary
# under the names of the checkpoint. The text is the source of some standard modules. We measure on others, which the
# dense model was not trained on, either.

# %% [markdown] tags=["zh"] pair="f8240c-b4aeba"
# 只看选中的位置，损失是零：猜测与注意力一致，没有任何东西提醒它，五分之四的注意力在别处。看全部位置，梯度马上就指出来了。
# 所以第一阶段要到处看，代价高，但很短；第二阶段只需保持住好的选择，同时让模型适应它。
#
# ## 动手训练
#
# 老师是稠密的 `glm-4.7-flash-nano`。它的三层和 MTP 层各配一个全新的索引器，尺寸与 `glm-5-nano` 的相同：16 个头，宽 128。
# 训练用 T = 256 个词元的窗口，K = 32。trueup 的算子没有反向，所以训练跑的是模型的*孪生*（twin）：
# 普通的 PyTorch，参数放在一个字典里，名字与检查点一致。训练文本是几个标准库模块的源码；测量用另外几个，稠密模型当初也没有学过它们。

# %%
import inspect
from dataclasses import replace
from importlib import import_module

from tokenizers import Tokenizer

from trueup.models import zoo
from trueup.models.config import ModelConfig
from trueup.models.training import indexer
from trueup.models.training.__main__ import encode, load_model

teacher = zoo.path("glm-4.7-flash-nano")
dense, _ = load_model(teacher)  # tensors by name
shipped = ModelConfig.from_folder(zoo.path("glm-5-nano"))
small = replace(shipped, indexer=replace(shipped.indexer, topk=32))
tokenizer = Tokenizer.from_file(str(teacher / "tokenizer.json"))


def ids(modules):  # [tokens]
    return encode(tokenizer, {m: inspect.getsource(import_module(m)) for m in modules.split()})


lessons = ids("argparse ast collections dataclasses inspect optparse pickle subprocess "
              "tarfile")
unseen = ids("difflib enum gzip base64")

# %%
def windows(stream, count, seed, T=256):  # [B, T + 2]: two more, to be predicted
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(stream) - T - 2, (count,), generator=generator)  # [B]
    return stream[starts[:, None] + torch.arange(T + 2)].long()


params = indexer.init_params(small, dense, seed=0)  # what will be learned
trainer = indexer.Trainer(params, dense, small, torch.float32)
mine, tuned = indexer.learned(params)
for name in mine[:5]:
    print(f"{name:<52} {list(params[name].shape)}")
assert len(mine) == 4 * 5  # of three layers and the MTP layer
assert all(torch.equal(params[name], dense[name]) for name in tuned)

# %% [markdown] tags=["en"]
# `tuned` are tensors of the dense model that the second stage may change; they begin as copies. `trainer.rounded()` is
# the whole model, as a dictionary. `losses` runs it once and gives each loss by itself. Which tensors does each reach?

# %% [markdown] tags=["zh"] pair="5ee883-d1de39"
# `tuned` 是第二阶段允许改动的稠密模型张量，开始时是一份副本。`trainer.rounded()` 是整个模型，一个字典。
# `losses` 拿它做一次前向，把各个损失分开给出。它们各自的梯度到得了哪些张量？

# %%
def reached(loss):
    """The length of the gradient, by name, of each tensor that gets one."""
    loss.backward()
    lengths = {name: v.grad.norm().item() for name, v in params.items() if v.grad is not None}
    for v in params.values():
        v.grad = None
    return lengths


def main_and_kl():
    found = indexer.losses(trainer.rounded(), small, windows(lessons, 2, seed=0), sparse=True)
    return reached(found["main"]), reached(found["divergence"])


by_main, by_kl = main_and_kl()
assert set(by_kl) == set(mine)  # nothing but the indexers
assert set(by_main) < set(tuned)  # and not the indexers
assert min(by_kl.values()) > 0

# %% [markdown] tags=["en"]
# So the two can run side by side, in one backward, without disturbing each other.
#
# Now measure: the dense model, where indexers choose but attention takes no notice, and the same model with attention
# to their choice. A *random* K of the t + 1 positions that row t sees would hold, on average, K / (t + 1) of its
# attention. Recall is taken over the rows that see more than K, by layer; the fourth is the MTP layer's.

# %% [markdown] tags=["zh"] pair="69a02a-5591fb"
# 所以两者可以在同一次反向里并行，互不干扰。
#
# 现在测一测：先是稠密模型（索引器照选，注意力不理会），再是同一个模型，但位置由未经训练的索引器来选。第 t 行看得到 t + 1 个位置，*随机*选 K 个，
# 平均占到的份额是 K / (t + 1)。
# 召回率只统计看得到的位置超过 K 个的行，按层列出，第四个是 MTP 层的。

# %%
def measure(label, **kwargs):
    found = indexer.evaluate(trainer.rounded(), small, unseen, T=256, limit=16, **kwargs)
    recall = [found[f"recall{layer}"] for layer in range(4)]  # 3: the MTP layer
    shares = " ".join(f"{share:.2f}" for share in recall)
    print(f"{label:<16} loss {found['loss']:.2f}   recall {shares}")
    return found["loss"], recall


at_first, _ = measure("dense attention", dense=True)
lost, untrained = measure("untrained")
chance = sum(32 / (t + 1) for t in range(32, 256)) / (256 - 32)
assert abs(chance - 0.30) < 0.01 and all(abs(share - chance) < 0.15 for share in untrained)
assert lost > 1.5 * at_first and max(untrained) < 0.4

# %% [markdown] tags=["en"]
# The first stage: 40 steps on four windows each. Everything but the indexers is frozen. `step` is told which share of
# the training is done; below `WARM_UP` it is in this stage. (Matrices learn by the optimiser Muon, which makes a step
# nearly as long in every direction; vectors by AdamW.)

# %% [markdown] tags=["zh"] pair="e10113-fcd2ed"
# 第一阶段：40 步，每步四个窗口，索引器以外的一切都冻结。要告诉 `step` 训练进行到了几成；不到 `WARM_UP` 就是这个阶段。
# （矩阵用 Muon 优化器，它让每一步在各个方向上的步长几乎相同；向量用 AdamW。）

# %%
curve = []
for i in range(40):
    progress = indexer.WARM_UP * i / 40
    curve.append(trainer.step(windows(lessons, 4, seed=i), 256, progress))

warm, recall = measure("after warm-up")
assert all(torch.equal(params[name], dense[name]) for name in tuned)
assert min(recall) > 0.75 and warm < 1.05 * at_first

# %% [markdown] tags=["en"]
# And the second, six steps. Now attention is sparse in training, too, and the model learns along. Had we begun here, with
# untrained indexers, the model would have been changed much more: its gradient with those is `by_main`, above; now
# it is not two thirds as long:

# %% [markdown] tags=["zh"] pair="d0c1eb-2c93a2"
# 接着是第二阶段，六步。现在训练时的注意力也是稀疏的，模型跟着一起学。假如一开始就做这一步，用未经训练的索引器，模型的变动会大得多：
# 那时模型的梯度就是前面的 `by_main`，现在的长度不到它的三分之二：

# %%
def length(lengths):  # of all together
    return sum(one**2 for one in lengths.values()) ** 0.5


by_main_now, _ = main_and_kl()
assert length(by_main) > 1.5 * length(by_main_now)

for i in range(6):
    progress = indexer.WARM_UP + (1 - indexer.WARM_UP) * i / 6
    curve.append(trainer.step(windows(lessons, 4, seed=40 + i), 256, progress))

final, recall = measure("after both")
assert not any(torch.equal(params[name], dense[name]) for name in tuned)
assert min(recall) > 0.75 and final < 1.05 * at_first

# %% tags=["fold"]
from IPython.display import HTML

points = [(40 + 8.5 * i, 130 - 16 * value) for i, value in enumerate(curve)]
line = " ".join(f"{x:g},{y:.1f}" for x, y in points)
marks = "".join(f'<text x="34" y="{134 - 16 * v}" text-anchor="end">{v}</text>'
                for v in (0, 2, 4, 6))
stage = points[40][0] - 4
axes = ('<g stroke="currentColor" stroke-opacity="0.6" fill="none"><path d="M40 10V130H435"/>'
        f'<path d="M{stage:g} 10V130" stroke-dasharray="4 4"/></g>'
        '<text x="40" y="146">1</text><text x="435" y="146" text-anchor="end">46</text>')
caption = ('<span lang="en">KL by step, added up over the layers, on the step\'s windows. '
           'At the dashed line stage 2 begins: from there it counts chosen positions only.'
           '</span>'
           '<span lang="zh">每一步的 KL 散度，四层相加，在这一步的窗口上计算。'
           '虚线处第二阶段开始，此后只算选中的位置。</span>')
HTML('<figure class="trueup-picture"><svg viewBox="0 0 450 150" width="450" role="img" '
     'style="max-width:100%;height:auto" aria-label="KL by step" fill="currentColor" '
     f'font-size="12">{axes}{marks}<polyline points="{line}" fill="none" '
     'stroke="currentColor" stroke-width="2"/></svg>'
     f'<figcaption>{caption}</figcaption></figure>')

# %% [markdown] tags=["en"]
# The second stage has changed next to nothing here: after the warm-up there was little left to gain, and six steps gain
# little. At DeepSeek's size it is nearly all of the work, 943.7 of 945.8 billion tokens.
#
# ## Why the KL is the right loss
#
# We wanted recall, and trained something else. But the one bounds the other. For any set of positions, its mass under
# the target and its mass under the guess differ by at most $\sqrt{D/2}$ (Pinsker's inequality). The choice is the best
# set under the guess. So it can fall behind the best set under the target by at most twice that, $\sqrt{2D}$,
# also on average over rows, since the root is concave. To check it, an onlooker (`attend`) takes each layer's input and
# attention from a dense forward:

# %% [markdown] tags=["zh"] pair="9a7563-b22bc4"
# 在这里，第二阶段几乎没有改变什么：预热之后剩下的余地本来就小，六步也做不了多少。在 DeepSeek 的规模上，它几乎就是全部工作：
# 9458 亿个词元里的 9437 亿。
#
# ## 为什么该用 KL 散度
#
# 想要的是召回率，训练的却是另一个量。不过后者能约束前者。任取一组位置，它在目标下的份额与在猜测下的份额，最多相差 $\sqrt{D/2}$
# （Pinsker 不等式）。选中的是猜测下最好的一组，所以与目标下最好的一组相比，最多落后这个数的两倍，即 $\sqrt{2D}$；平方根是凹函数，
# 所以对各行取平均也成立。
# 为了验证，在一次稠密的前向里挂一个观察函数（`attend`），取下每一层的输入和注意力：

# %%
from trueup.models.training import twin
from trueup.models.training.indexer_twin import index_scores


@torch.no_grad()
def look(stream, count, seed, T=256):
    """By layer of a dense forward: input [B, T, H], attention [B, T, T], heads averaged."""
    seen = {}

    def attend(layer, x, q, k, v):  # [B, T, H], [B, N, T, D] twice, [B, N, T, Dv]
        scores = q * small.softmax_scale @ k.mT + twin.causal_mask(T, q.dtype)  # [B, N, T, T]
        weights = scores.softmax(-1)  # [B, N, T, T]
        seen[layer] = x, weights.mean(1)
        return weights @ v  # [B, N, T, Dv]

    twin.forward(dense, small, windows(stream, count, seed, T)[:, :T], attend=attend)
    return seen


def recall_of(attention, scores, k):  # over rows that see more than k
    return (attention * chosen(scores, k)).sum(-1)[:, k:].mean().item()

# %%
ours = trainer.rounded()
for layer, (x, attention) in look(unseen, 8, seed=1).items():
    with torch.no_grad():
        # ours | dense: the dense model's tensors, and our indexers besides
        scores = index_scores(ours | dense, small, layer, x)  # [B, T, T]
    best, got = recall_of(attention, attention, 32), recall_of(attention, scores, 32)
    bound = (2 * divergence(attention[:, 32:], scores[:, 32:]).item()) ** 0.5
    print(f"layer {layer}: at least {best - bound:.2f}, reached {got:.2f}, "
          f"best choice {best:.2f}")
    assert best - bound <= got <= best + 1e-6 and best - got < 0.1

# %% [markdown] tags=["en"]
# What was reached is far better than what was promised.
#
# ## The indexers of glm-5-nano
#
# `glm-5-nano` comes with trueup. It was made by the same two functions, `init_params` and `Trainer`, from the whole
# standard library in place of nine modules. It has K = 64. Take windows of 512:

# %% [markdown] tags=["zh"] pair="592887-ffd054"
# 实际做到的，比保证的好得多。
#
# ## glm-5-nano 的索引器
#
# `glm-5-nano` 是 trueup 自带的，由同样的两个函数 `init_params` 和 `Trainer` 做成，只是训练文本不是九个模块，而是整个标准库。
# 它的 K = 64。取 512 个词元的窗口：

# %%
sparse, _ = load_model(zoo.path("glm-5-nano"))


def held_out(params, **kwargs):
    return indexer.evaluate(params, shipped, unseen, T=512, limit=8, **kwargs)


as_dense, as_sparse = held_out(sparse | dense, dense=True), held_out(sparse)
print(f"loss: dense {as_dense['loss']:.3f}, sparse {as_sparse['loss']:.3f}")
recall = [as_sparse[f"recall{layer}"] for layer in range(4)]
print("recall by layer:", *(f"{share:.2f}" for share in recall))
assert abs(as_sparse["loss"] / as_dense["loss"] - 1) < 0.02 and min(recall) > 0.8

# %% [markdown] tags=["en"]
# What did the longer training buy? Ask each indexer for its best k, on the dense model's attention:

# %% [markdown] tags=["zh"] pair="6c454a-24704f"
# 训练得更久，换来了什么？在稠密模型的注意力上，让每个索引器各给出最好的 k 个：

# %%
KS = (8, 16, 32, 64, 128, 256)
fresh = indexer.init_params(small, dense, seed=1)
far = look(unseen, 4, seed=3, T=512)


@torch.no_grad()
def recalls(params, layer):
    x, attention = far[layer]
    scores = index_scores(params | dense, shipped, layer, x)  # [B, T, T]
    return [recall_of(attention, scores, k) for k in KS]


curves, gains = {}, []
for layer, (_, attention) in far.items():
    best = [recall_of(attention, attention, k) for k in KS]
    curves[layer] = [recalls(sparse, layer), recalls(ours, layer), recalls(fresh, layer), best]
    it, we, untrained, ideal = (values[KS.index(64)] for values in curves[layer])  # at k = 64
    assert ideal + 1e-6 >= it > 0.8 and we > untrained + 0.3
    gains.append(it - we)
assert gains[1] < 0.02 and max(gains) < 0.1

# %% tags=["fold"]
LOOKS = ('stroke-width="2"', 'stroke-width="2" stroke-dasharray="7 3"',
         'stroke-width="2" stroke-dasharray="1 4"', 'stroke-width="0.7"')
drawn = ""
for layer, lines in curves.items():
    x0 = 34 + 150 * layer
    drawn += (f'<path d="M{x0} 20V140H{x0 + 120}" stroke="currentColor" fill="none" '
              f'opacity="0.5"/><text x="{x0 + 60}" y="14" text-anchor="middle">'
              f'layer {layer}</text>')
    for i in (0, 3, 5):
        drawn += f'<text x="{x0 + 24 * i}" y="154" text-anchor="middle">{KS[i]}</text>'
    for v in (0, 0.5, 1):
        drawn += f'<text x="{x0 - 4}" y="{144 - 120 * v:g}" text-anchor="end">{v}</text>'
    for values, style in zip(lines, LOOKS, strict=True):
        points = " ".join(f"{x0 + 24 * i},{140 - 120 * v:.1f}" for i, v in enumerate(values))
        drawn += f'<polyline points="{points}" fill="none" stroke="currentColor" {style}/>'
caption = ('<span lang="en">Recall by k. Solid: glm-5-nano; dashed: ours; dotted: untrained; '
           'thin: the best possible, nearly hidden by the first two.</span>'
           '<span lang="zh">k 处的召回率。实线：glm-5-nano；虚线：我们的；'
           '点线：未经训练的；细线：最优的选择，几乎被前两条遮住。</span>')
HTML('<figure class="trueup-picture"><svg viewBox="0 0 464 160" width="580" role="img" '
     'style="max-width:100%;height:auto" aria-label="recall by k" fill="currentColor" '
     f'font-size="11">{drawn}</svg><figcaption>{caption}</figcaption></figure>')

# %% [markdown] tags=["en"]
# Ours comes close, though it has learned on windows of 256 and is asked about 512. Most of what there is to learn is
# learned at once. The longer training adds next to nothing in layer 1, which goes by distance
# ([chapter 13](ch13_sparse.md)), and a few points in the others.
#
# ## The difference is small
#
# Sparse and dense model share most of their tensors. So `glm-5-nano` is kept as a *delta*: a file with the tensors that
# are new or changed, and a note that names the dense model for the rest.

# %% [markdown] tags=["zh"] pair="7660e4-65c9cb"
# 我们的已经很接近，尽管学的时候窗口是 256，考的时候是 512。该学的大半一开始就学到了。
# 训练得更久，在看距离的第 1 层（[第 13 章](ch13_sparse.md)）几乎没有再添什么，其余各层多出几个百分点。
#
# ## 差别很小
#
# 稀疏模型与稠密模型的大部分张量是同一份。所以 `glm-5-nano` 存成一份*增量*（delta）：一个文件只装新的和改过的张量，
# 另有一条说明，写着其余的去哪个稠密模型里取。

# %%
changed = [n for n, v in sparse.items() if n not in dense or not torch.equal(v, dense[n])]
mine, tuned = indexer.learned(sparse)
assert set(mine) <= set(changed) <= {*mine, *tuned}
assert set(sparse) - set(mine) == set(dense)  # the indexers are all that is new


def share(names):
    return sum(sparse[n].numel() for n in names) / sum(v.numel() for v in sparse.values())


left_out = [n for n in sparse if n.endswith("kv_b_proj.weight")]
print(f"indexers {share(mine):.2f}, tuned {share(tuned):.2f}, "
      f"kv_b would be {share(left_out):.2f}")
assert share([*mine, *tuned]) < 0.5 and not set(left_out) & set(changed)

# wq_b, wk, weights_proj and k_norm of 78 layers
glm5 = 78 * (32 * 128 * 2048 + 128 * 6144 + 32 * 6144 + 2 * 128)
assert 0.0009 < glm5 / 743.9e9 < 0.0011

# %% [markdown] tags=["en"]
# In GLM-5 the indexers of its 78 layers are a thousandth of the weights. Here they are a larger part, because everything
# else is tiny. What we left out: DeepSeek's second stage trains the whole model. Ours keeps `kv_b`, experts, embeddings
# and head as they are. A sparse row sees less, so what may adapt is how attention asks and what it hands on: the
# projections of queries and latents, the output projection, and the norms. The rest would have made the file larger, with
# little left to gain.
#
# `make train-indexer` makes the shipped one again, that is `python -m trueup.models.training indexer --model FOLDER`, where
# the folder holds the dense model. It is resumable. How long it ran, on what, and what it reached stands in the model's
# card, `zoo/glm-5-nano/README.md`.
#
# ## What real engines do
#
# Serving engines do not train. Training frameworks do:
#
# - Megatron-LM (`megatron/core/ops/attention/dsa/reference.py`): one function for both stages, `compute_dsa_indexer_loss`.
#   Its flag `sparse_loss` masks both sides with the choice before the softmax, as ours does. Heads are summed across
#   tensor-parallel ranks, then normalised.
# - torch_npu has the loss and its gradient as fused operators, `npu_dense_lightning_indexer_grad_kl_loss` for the first
#   stage and `npu_sparse_lightning_indexer_grad_kl_loss` for the second (op-plugin: pages of these names in `docs/`). The
#   gradient that they state is guess minus target.
#
# ## Exercises
#
# For experiments there is something faster. In the warm-up nothing but the indexers changes, so layers are independent,
# and a layer's inputs and attention can be kept. `learn` trains the indexer of one layer on what an onlooker kept, and
# returns its last loss and its scores on unseen windows.

# %% [markdown] tags=["zh"] pair="3d260c-0c19a4"
# GLM-5 有 78 层，全部索引器加起来只占权重的千分之一。在这里占得多些，因为别的都很小。
# 我们省去了什么：DeepSeek 的第二阶段训练整个模型，我们则不动 `kv_b`、专家、嵌入和输出头。
# 稀疏的一行看到的东西少了，要调整的是注意力怎样问、问到之后交出什么：查询和潜变量的投影、输出投影，还有归一化。
# 其余的也训练，文件会变大，收益却不多。
#
# `make train-indexer` 可以把自带的这个模型重新做一遍，也就是 `python -m trueup.models.training indexer --model FOLDER`，
# 其中的文件夹放着稠密模型；中断后可以接着跑。训练了多久、在什么机器上、达到了什么水平，都写在模型卡 `zoo/glm-5-nano/README.md` 里。
#
# ## 真实引擎怎么做
#
# 推理引擎不训练，训练框架才训练：
#
# - Megatron-LM（`megatron/core/ops/attention/dsa/reference.py`）：两个阶段共用一个函数 `compute_dsa_indexer_loss`。
#   它的开关 `sparse_loss` 在 softmax 之前用选择把两边都遮住，与这里相同。各头先跨张量并行的 rank 相加，再归一化。
# - torch_npu 把这个损失连同梯度做成了融合算子：第一阶段用 `npu_dense_lightning_indexer_grad_kl_loss`，
#   第二阶段用 `npu_sparse_lightning_indexer_grad_kl_loss`（op-plugin：`docs/` 里的同名页面）。它们写明的梯度，就是猜测减目标。
#
# ## 练习
#
# 做实验有更快的办法。预热时只有索引器在变，所以各层互不相干，一层的输入和注意力可以存下来反复用。
# `learn` 用观察函数存下的数据训练某一层的索引器，返回最后的损失，以及它在没见过的窗口上的得分。

# %%
from trueup.models.training.optim import Muon

lesson, test = look(lessons, 48, seed=1), look(unseen, 16, seed=2)


def learn(layer, heads=4, relu=True, only_chosen=None, seed=0, steps=40):
    c = replace(small, indexer=replace(small.indexer, heads=heads))
    p = twin.init_params(c, seed) | dense
    new = [v.requires_grad_() for n, v in p.items() if f"layers.{layer}.self_attn.index" in n]
    muon = Muon({str(i): v for i, v in enumerate(new) if v.ndim == 2}, heads=1, decay=0.0)
    adamw = torch.optim.AdamW([v for v in new if v.ndim == 1], lr=indexer.LR["rest"])
    for i in range(steps):
        part = torch.arange(4 * i, 4 * i + 4) % 48  # [B]
        x, attention = (kept[part] for kept in lesson[layer])  # [B, T, H], [B, T, T]
        scores = index_scores(p, c, layer, x, relu=relu)  # [B, T, T]
        if only_chosen:  # the second stage's loss
            mask = chosen(scores.detach(), only_chosen)  # [B, T, T]
            attention, scores = attention * mask, scores.masked_fill(~mask, -inf)
        loss = divergence(attention / attention.sum(-1, keepdim=True), scores)
        for v, grad in zip(new, torch.autograd.grad(loss, new), strict=True):
            v.grad = grad
        adamw.step()
        muon.step(indexer.LR["muon"] * indexer.rate(i / steps))
    with torch.no_grad():
        return loss.item(), index_scores(p, c, layer, test[layer][0], relu=relu)

# %% [markdown] tags=["en"]
# **1.** Begin with the second stage's loss, in layer 2, with K = 8. Compare its last loss, its recall, and its KL over all
# positions with those of the first stage's.

# %% [markdown] tags=["zh"] pair="cd0e86-5fed9d"
# **1.** 在第 2 层上，K = 8，一上来就用第二阶段的损失。把它最后的损失、召回率、在全部位置上的 KL 散度，与第一阶段的比一比。

# %% tags=["solution"]
_, attention = test[2]
(loss_1, scores_1), (loss_2, scores_2) = learn(2), learn(2, only_chosen=8)
recall_1, recall_2 = recall_of(attention, scores_1, 8), recall_of(attention, scores_2, 8)
kl_1, kl_2 = divergence(attention, scores_1).item(), divergence(attention, scores_2).item()
print(f"first stage:  loss {loss_1:.2f}, recall {recall_1:.2f}, KL over all {kl_1:.2f}")
print(f"second stage: loss {loss_2:.2f}, recall {recall_2:.2f}, KL over all {kl_2:.2f}")
assert loss_2 < loss_1 and recall_2 < recall_1 - 0.01 and kl_2 > 1.2 * kl_1

# %% [markdown] tags=["en", "solution"]
# Its loss looks better, its choice is worse. It is not *much* worse: all rows share the indexer's weights, and what one
# finds by luck teaches the others. Here 8 of 256 positions are chosen; at 2,048 of 131,072 luck is twice as rare. And in
# this experiment the model is frozen. The harm that it would take is not in these numbers.

# %% [markdown] tags=["zh", "solution"] pair="6191c4-fb0613"
# 它的损失看着更好，选得却更差。差得*不算多*：各行共用索引器的权重，一行碰巧找到了，别的行也跟着学会。
# 这里是 256 个位置里选 8 个；131,072 个里选 2,048 个，碰巧的机会还要少一半。而且这个实验里模型是冻结的，模型会受的损害不在这些数里。

# %% [markdown] tags=["en"]
# **2.** How many index heads does layer 2 need? Try 1, 4 and 16.

# %% [markdown] tags=["zh"] pair="0e7310-cb74ed"
# **2.** 第 2 层需要几个索引头？试 1、4、16。

# %% tags=["solution"]
found = {heads: learn(2, heads)[1] for heads in (1, 4, 16)}
for heads, scores in found.items():
    recall, kl = recall_of(attention, scores, 32), divergence(attention, scores)
    print(f"{heads:>2} heads: recall {recall:.3f}, KL {kl:.2f}")
assert recall_of(attention, found[4], 32) > recall_of(attention, found[16], 32) - 0.03
assert divergence(attention, found[16]) < divergence(attention, found[1])

# %% [markdown] tags=["en", "solution"]
# Four do nearly as well as sixteen, in a model this small. One is behind in the KL, and runs the risk of exercise 3.

# %% [markdown] tags=["zh", "solution"] pair="9010ce-029ee6"
# 模型这么小，四个头与十六个相差无几。一个头的 KL 散度要高些，还有练习 3 里的风险。

# %% [markdown] tags=["en"]
# **3.** One head, in layer 1, with seeds 0, 3, 5 and 6: once as it is, once without ReLU. What happens to some of the first
# kind, and why not to models with 32 heads?

# %% [markdown] tags=["zh"] pair="248d5f-978ae1"
# **3.** 在第 1 层用一个头，种子取 0、3、5、6：一遍照常，一遍不用 ReLU。前一种里，有的会出什么事？有 32 个头的模型为什么不会？

# %% tags=["solution"]
_, attention = test[1]
for relu in (True, False):
    kept = [learn(1, heads=1, relu=relu, seed=seed)[1] for seed in (0, 3, 5, 6)]
    recall = [recall_of(attention, scores, 32) for scores in kept]
    print("with ReLU:   " if relu else "without ReLU:", *(f"{share:.2f}" for share in recall))
    dead = [(scores[scores > -inf] == 0).float().mean().item() > 0.99 for scores in kept]
    assert any(dead) == relu and not all(dead)
    assert [share < 0.5 for share in recall] == dead

# %% [markdown] tags=["en", "solution"]
# Some heads are *dead*: every dot product is negative, so ReLU makes every score 0, and no gradient comes through. It
# takes all heads of a layer to be dead at once. Without ReLU nothing dies, and recall is as good here; the paper's reason
# for ReLU is speed.

# %% [markdown] tags=["zh", "solution"] pair="a032fe-d14d9c"
# 有的头*死*了：所有点积都是负的，ReLU 把得分全变成 0，梯度也过不来。要出事，得一层的头同时全死。
# 不用 ReLU 就不会死，在这里召回率也一样好；论文说，用 ReLU 是为了快。

# %% [markdown] tags=["en"]
# **4.** LayerNorm's bias can move an index key's zero ([chapter 13](ch13_sparse.md)). Has `glm-5-nano` made use of it? Set
# the bias to zero, and look at the recall. Compare: leave the ReLU out of the finished model.

# %% [markdown] tags=["zh"] pair="33d35a-71252b"
# **4.** LayerNorm 的偏置可以移动索引键的零点（[第 13 章](ch13_sparse.md)）。`glm-5-nano` 用上它了吗？把偏置置零，看看召回率。
# 再比一比：从训练好的模型里去掉 ReLU。

# %% tags=["solution"]
@torch.no_grad()
def at_64(params, **kwargs):
    return [recall_of(attention, index_scores(params | dense, shipped, layer, x, **kwargs), 64)
            for layer, (x, attention) in far.items()]  # by layer


zeros = {n: torch.zeros_like(v) for n, v in sparse.items() if n.endswith("k_norm.bias")}
unbiased = sparse | zeros
usual, no_bias, no_relu = at_64(sparse), at_64(unbiased), at_64(sparse, relu=False)
assert max(a - b for a, b in zip(usual, no_bias, strict=True)) < 0.02  # hardly any use
assert max(a - b for a, b in zip(usual, no_relu, strict=True)) > 0.02  # it relies on that

# %% [markdown] tags=["en", "solution"]
# It has not: the biases began at zero and have hardly moved. But it cannot do without ReLU, having learned with it. In
# exercise 3 an indexer that learned *without* did as well. What a part is worth is seen by training without it.

# %% [markdown] tags=["zh", "solution"] pair="85c578-71a581"
# 没有用上：偏置从零开始，几乎没有动过。ReLU 却去不得，因为它是带着 ReLU 学的；而练习 3 里，*不用* ReLU 学出来的一样好。
# 一个部件值多少，要去掉它重新训练才看得出来。

# %% [markdown] tags=["en"]
# ## On an NPU machine
#
# The same cells run there, on the host's CPU: the twin is plain PyTorch. What serves the result on the NPU is
# [chapter 13](ch13_sparse.md). No device has run it yet: see [what ran where](../what-ran-where.md).

# %% [markdown] tags=["zh"] pair="184e88-6a0c68"
# ## 在 NPU 机器上
#
# 同样的单元格在那里也能运行，用的是主机的 CPU：孪生模型只是普通的 PyTorch。把结果放到 NPU 上推理，是[第 13 章](ch13_sparse.md)的内容。
# 那一部分还没有在任何设备上运行过，见[哪些在哪里跑过](../what-ran-where.md)。
