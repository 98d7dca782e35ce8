"""BERT that tells paraphrases from other pairs, written for ColossalAI's API; only imports and devices are changed.

Run: booster run --nproc-per-node 2 tests/ports/bert.py --plugin hybrid_parallel
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

import booster as colossalai
from booster import Booster, DistCoordinator, get_accelerator
from booster.optim import HybridAdam
from booster.plugins import GeminiPlugin, HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin

NUM_EPOCHS = 2
LEARNING_RATE = 5e-4
WEIGHT_DECAY = 0.01
WARMUP_FRACTION = 0.1
VOCAB_SIZE = 64
SENTENCE_LENGTH = 7

output_transform_fn = lambda x: x
criterion = lambda x: x.loss


class PairDataset(Dataset):
    """Pairs of sentences of random words; in half of them the second has the words of the first in another order."""

    def __init__(self, num_pairs, seed):
        generator = torch.Generator().manual_seed(seed)
        first = torch.randint(3, VOCAB_SIZE, (num_pairs, SENTENCE_LENGTH), generator=generator)
        other = torch.randint(3, VOCAB_SIZE, (num_pairs, SENTENCE_LENGTH), generator=generator)
        self.labels = torch.arange(num_pairs) % 2
        second = torch.where(self.labels[:, None] == 1, first.flip(1), other)
        cls, sep = torch.full((num_pairs, 1), 1), torch.full((num_pairs, 1), 2)
        self.input_ids = torch.cat([cls, first, sep, second, sep], dim=1)
        self.token_type_ids = (torch.arange(self.input_ids.shape[1]) > SENTENCE_LENGTH + 1).long()

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return {
            "input_ids": self.input_ids[index],
            "token_type_ids": self.token_type_ids,
            "attention_mask": torch.ones_like(self.input_ids[index]),
            "labels": self.labels[index],
        }


def move_to_cuda(batch):
    return {k: v.to(get_accelerator().get_current_device()) for k, v in batch.items()}


def is_pipeline(booster):
    return isinstance(booster.plugin, HybridParallelPlugin) and booster.plugin.pp_size > 1


@torch.no_grad()
def evaluate_model(model, criterion, test_dataloader: DataLoader, booster, coordinator):
    use_pipeline = is_pipeline(booster)
    is_pp_last_device = use_pipeline and booster.plugin.stage_manager.is_last_stage(ignore_chunk=True)
    model.eval()
    device = get_accelerator().get_current_device()
    accum_loss = torch.zeros(1, device=device)
    correct = torch.zeros(1, device=device)
    total = torch.zeros(1, device=device)
    for batch in test_dataloader:
        batch = move_to_cuda(batch)
        labels = batch["labels"]
        if use_pipeline:
            pp_group = booster.plugin.pp_group
            last_rank = dist.get_global_rank(pp_group, booster.plugin.pp_size - 1)
            outputs = booster.execute_pipeline(iter([batch]), model, criterion, return_loss=True, return_outputs=True)
            object_list = [None, None]
            if is_pp_last_device:
                logits = outputs["outputs"]["logits"]
                object_list = [torch.argmax(logits, dim=1), outputs["loss"]]
            dist.broadcast_object_list(object_list, src=last_rank, group=pp_group)
            preds, val_loss = object_list
        else:
            val_loss, logits = model(**batch)[:2]
            preds = torch.argmax(logits, dim=1)
        accum_loss.add_(val_loss.to(device))
        correct.add_((preds.to(device) == labels).sum())
        total.add_(len(labels))
    dist.all_reduce(accum_loss.div_(len(test_dataloader)))
    dist.all_reduce(correct)
    dist.all_reduce(total)
    if coordinator.is_master():
        loss, accuracy = accum_loss.item() / coordinator.world_size, correct.item() / total.item()
        print(f"evaluation: average_loss {loss:.6f} accuracy {accuracy:.4f}", flush=True)


def train_epoch(epoch, model, optimizer, _criterion, lr_scheduler, train_dataloader, booster, coordinator):
    use_pipeline = is_pipeline(booster)
    is_pp_last_device = use_pipeline and booster.plugin.stage_manager.is_last_stage(ignore_chunk=True)
    print_flag = (not use_pipeline and coordinator.is_master()) or (use_pipeline and is_pp_last_device)
    total_step = len(train_dataloader)

    model.train()
    optimizer.zero_grad()
    train_dataloader.sampler.set_epoch(epoch)
    train_dataloader_iter = iter(train_dataloader)
    with tqdm(range(total_step), desc=f"Epoch [{epoch + 1}/{NUM_EPOCHS}]", disable=not print_flag) as pbar:
        for _ in pbar:
            if use_pipeline:
                outputs = booster.execute_pipeline(
                    train_dataloader_iter, model, _criterion, optimizer, return_loss=True
                )
                loss = outputs["loss"] if is_pp_last_device else None
            else:
                data = move_to_cuda(next(train_dataloader_iter))
                outputs = model(**data)
                loss = _criterion(outputs, None)
                booster.backward(loss, optimizer)
            if loss is not None:
                loss = loss.detach().clone()
                dist.all_reduce(loss, group=booster.plugin.dp_group)
                loss.div_(booster.plugin.dp_size)
            if print_flag:
                pbar.set_postfix({"loss": loss.item(), "lr": lr_scheduler.get_last_lr()[0]})
                print(f"epoch {epoch} loss {loss.item():.6f}", flush=True)
            optimizer.step()
            optimizer.zero_grad()
            lr_scheduler.step()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "-p",
        "--plugin",
        type=str,
        default="torch_ddp",
        choices=["torch_ddp", "torch_ddp_fp16", "gemini", "low_level_zero", "hybrid_parallel", "torch_fsdp"],
    )
    parser.add_argument("-x", "--mixed_precision", default="fp16", choices=["fp16", "bf16", "fp32"])
    parser.add_argument("--pp_style", default="interleaved", choices=["1f1b", "interleaved"])
    parser.add_argument("-b", "--batch_size", type=int, default=16)
    parser.add_argument("-l", "--lr", type=float, default=LEARNING_RATE)
    parser.add_argument("-n", "--num_samples", type=int, default=64)
    parser.add_argument("-o", "--output", default="./output", help="checkpoint directory")
    parser.add_argument("-r", "--resume", type=int, default=0, help="epoch to resume from")
    parser.add_argument("--use_fp8_comm", action="store_true", help="for using fp8 during communication")
    args = parser.parse_args()

    colossalai.launch_from_torch(seed=42)
    coordinator = DistCoordinator()
    lr = args.lr * coordinator.world_size

    booster_kwargs = {}
    if args.plugin == "torch_ddp_fp16":
        booster_kwargs["mixed_precision"] = "fp16"
    if args.plugin.startswith("torch_ddp"):
        plugin = TorchDDPPlugin(fp8_communication=args.use_fp8_comm)
    elif args.plugin == "gemini":
        plugin = GeminiPlugin(precision=args.mixed_precision, initial_scale=2**5, fp8_communication=args.use_fp8_comm)
    elif args.plugin == "low_level_zero":
        plugin = LowLevelZeroPlugin(precision=args.mixed_precision, initial_scale=2**5)
    elif args.plugin == "hybrid_parallel":
        plugin = HybridParallelPlugin(
            tp_size=1,
            pp_size=2,
            num_microbatches=None,
            pp_style=args.pp_style,
            num_model_chunks=1 if args.pp_style == "1f1b" else 2,
            microbatch_size=4,
            enable_all_optimization=True,
            zero_stage=1,
            precision=args.mixed_precision,
            initial_scale=1,
            fp8_communication=args.use_fp8_comm,
        )
    elif args.plugin == "torch_fsdp":
        from torch.distributed.fsdp.fully_sharded_data_parallel import MixedPrecision

        dtype = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}[args.mixed_precision]
        plugin = TorchFSDPPlugin(
            mixed_precision=MixedPrecision(param_dtype=dtype, reduce_dtype=dtype, buffer_dtype=dtype),
            fp8_communication=args.use_fp8_comm,
        )
    booster = Booster(plugin=plugin, **booster_kwargs)

    train_dataloader = plugin.prepare_dataloader(
        PairDataset(args.num_samples, seed=0), batch_size=args.batch_size, shuffle=True, drop_last=True
    )
    test_dataloader = plugin.prepare_dataloader(PairDataset(32, seed=1), batch_size=args.batch_size)

    config = BertConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=2,
    )
    model = BertForSequenceClassification(config)
    model = model.to(get_accelerator().get_current_device())

    no_decay = ["bias", "LayerNorm.weight"]
    optimizer_grouped_parameters = [
        {
            "params": [p for n, p in model.named_parameters() if not any(word in n for word in no_decay)],
            "weight_decay": WEIGHT_DECAY,
        },
        {
            "params": [p for n, p in model.named_parameters() if any(word in n for word in no_decay)],
            "weight_decay": 0.0,
        },
    ]
    optimizer = HybridAdam(optimizer_grouped_parameters, lr=lr, eps=1e-8)

    total_steps = len(train_dataloader) * NUM_EPOCHS
    num_warmup_steps = int(WARMUP_FRACTION * total_steps)
    lr_scheduler = get_linear_schedule_with_warmup(
        optimizer, num_warmup_steps=num_warmup_steps, num_training_steps=total_steps
    )

    def _criterion(outputs, inputs):
        outputs = output_transform_fn(outputs)
        loss = criterion(outputs)
        return loss

    model, optimizer, _criterion, _, lr_scheduler = booster.boost(
        model, optimizer, criterion=_criterion, lr_scheduler=lr_scheduler
    )

    if args.resume > 0:
        path = os.path.join(args.output, f"epoch{args.resume}")
        booster.load_model(model, os.path.join(path, "modeling"))
        booster.load_optimizer(optimizer, os.path.join(path, "optimizer"))
        booster.load_lr_scheduler(lr_scheduler, os.path.join(path, "lr_scheduler"))

    for epoch in range(args.resume, NUM_EPOCHS):
        train_epoch(epoch, model, optimizer, _criterion, lr_scheduler, train_dataloader, booster, coordinator)
        path = os.path.join(args.output, f"epoch{epoch + 1}")
        os.makedirs(os.path.join(path, "modeling"), exist_ok=True)
        booster.save_model(model, os.path.join(path, "modeling"), shard=True)
        booster.save_optimizer(optimizer, os.path.join(path, "optimizer"), shard=True)
        booster.save_lr_scheduler(lr_scheduler, os.path.join(path, "lr_scheduler"))
        coordinator.block_all()

    evaluate_model(model, _criterion, test_dataloader, booster, coordinator)


if __name__ == "__main__":
    main()
