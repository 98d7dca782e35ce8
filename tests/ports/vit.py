"""ViT on handwritten digits in pipeline stages, written for ColossalAI's API; only imports and devices are changed.

Run: booster run --nproc-per-node 2 tests/ports/vit.py --plugin hybrid_parallel --pp_size 2
"""

import argparse
import os

import torch
import torch.distributed as dist
import transformers
from sklearn.datasets import load_digits
from torch.utils.data import Dataset
from tqdm import tqdm
from transformers import ViTConfig, ViTForImageClassification

import booster as colossalai
from booster import Booster, DistCoordinator, disable_existing_loggers, get_accelerator, get_dist_logger
from booster.lr_scheduler import CosineAnnealingWarmupLR
from booster.optim import HybridAdam
from booster.plugins import GeminiPlugin, HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin


class DigitsDataset(Dataset):
    def __init__(self, start, stop):
        digits = load_digits()
        self.pixel_values = torch.tensor(digits.images[start:stop], dtype=torch.float32).unsqueeze(1) / 8 - 1
        self.labels = digits.target[start:stop]
        self.label_names = [str(name) for name in digits.target_names]
        self.num_labels = len(self.label_names)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, idx):
        return self.pixel_values[idx], self.labels[idx]


def digits_collator(batch):
    return {
        "pixel_values": torch.stack([pixels for pixels, _ in batch], dim=0),
        "labels": torch.tensor([label for _, label in batch], dtype=torch.int64),
    }


def move_to_cuda(batch, device):
    return {k: v.to(device) for k, v in batch.items()}


def run_forward_backward(model, optimizer, criterion, data_iter, booster):
    if optimizer is not None:
        optimizer.zero_grad()
    if isinstance(booster.plugin, HybridParallelPlugin) and booster.plugin.pp_size > 1:
        output_dict = booster.execute_pipeline(
            data_iter, model, criterion, optimizer, return_loss=True, return_outputs=True
        )
        loss, outputs = output_dict["loss"], output_dict["outputs"]
    else:
        batch = next(data_iter)
        batch = move_to_cuda(batch, get_accelerator().get_current_device())
        outputs = model(**batch)
        loss = criterion(outputs, None)
        if optimizer is not None:
            booster.backward(loss, optimizer)
    return loss, outputs


def train_epoch(epoch, model, optimizer, criterion, lr_scheduler, dataloader, booster, coordinator):
    get_accelerator().synchronize()

    num_steps = len(dataloader)
    dataloader.sampler.set_epoch(epoch)
    data_iter = iter(dataloader)
    enable_pbar = coordinator.is_master()
    if isinstance(booster.plugin, HybridParallelPlugin) and booster.plugin.pp_size > 1:
        tp_rank = dist.get_rank(booster.plugin.tp_group)
        dp_rank = dist.get_rank(booster.plugin.dp_group)
        enable_pbar = tp_rank == 0 and dp_rank == 0 and booster.plugin.stage_manager.is_last_stage()

    model.train()
    with tqdm(range(num_steps), desc=f"Epoch [{epoch + 1}]", disable=not enable_pbar) as pbar:
        for _ in pbar:
            loss, _ = run_forward_backward(model, optimizer, criterion, data_iter, booster)
            optimizer.step()
            lr_scheduler.step()
            if enable_pbar:
                pbar.set_postfix({"loss": loss.item()})
                print(f"epoch {epoch} loss {loss.item():.6f}", flush=True)


@torch.no_grad()
def evaluate_model(epoch, model, criterion, eval_dataloader, booster, coordinator):
    get_accelerator().synchronize()
    model.eval()
    device = get_accelerator().get_current_device()
    accum_loss = torch.zeros(1, device=device)
    total_num = torch.zeros(1, device=device)
    accum_correct = torch.zeros(1, device=device)

    for batch in eval_dataloader:
        batch = move_to_cuda(batch, device)
        loss, outputs = run_forward_backward(model, None, criterion, iter([batch]), booster)
        to_accum = True
        if isinstance(booster.plugin, HybridParallelPlugin):
            to_accum = to_accum and (dist.get_rank(booster.plugin.tp_group) == 0)
            if booster.plugin.pp_size > 1:
                to_accum = to_accum and booster.plugin.stage_manager.is_last_stage()
        if to_accum:
            accum_loss += loss / len(eval_dataloader)
            preds = torch.argmax(outputs["logits"], dim=1)
            labels = batch["labels"]
            total_num += batch["labels"].shape[0]
            accum_correct += torch.sum(preds == labels)

    dist.all_reduce(accum_loss)
    dist.all_reduce(total_num)
    dist.all_reduce(accum_correct)
    if coordinator.is_master():
        accuracy = accum_correct.item() / total_num.item()
        print(f"evaluation of epoch {epoch}: average_loss {accum_loss.item():.6f} accuracy {accuracy:.4f}", flush=True)


def parse_demo_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("-o", "--output_path", type=str, default="./output_model")
    parser.add_argument("-p", "--plugin", type=str, default="hybrid_parallel")
    parser.add_argument("-e", "--num_epoch", type=int, default=2)
    parser.add_argument("-b", "--batch_size", type=int, default=16)
    parser.add_argument("--tp_size", type=int, default=1)
    parser.add_argument("--pp_size", type=int, default=2)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--weight_decay", type=float, default=0.01)
    parser.add_argument("--warmup_ratio", type=float, default=0.3)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--mixed_precision", default="fp16", choices=["fp16", "bf16", "fp32"])
    parser.add_argument("--grad_checkpoint", action="store_true")
    parser.add_argument("--resume", type=int, default=0)
    return parser.parse_args()


def main():
    args = parse_demo_args()

    colossalai.launch_from_torch(seed=args.seed)
    coordinator = DistCoordinator()
    world_size = coordinator.world_size

    disable_existing_loggers()
    logger = get_dist_logger()
    if coordinator.is_master():
        transformers.utils.logging.set_verbosity_info()
    else:
        transformers.utils.logging.set_verbosity_error()

    if args.plugin != "hybrid_parallel":
        args.tp_size = 1
        args.pp_size = 1

    train_dataset = DigitsDataset(0, 64)
    eval_dataset = DigitsDataset(64, 96)
    config = ViTConfig(
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=64,
        image_size=8,
        patch_size=2,
        num_channels=1,
    )
    config.num_labels = train_dataset.num_labels
    config.id2label = {str(i): c for i, c in enumerate(train_dataset.label_names)}
    config.label2id = {c: str(i) for i, c in enumerate(train_dataset.label_names)}
    model = ViTForImageClassification(config)
    logger.info("Finish building the model", ranks=[0])

    if args.grad_checkpoint:
        model.gradient_checkpointing_enable()

    booster_kwargs = {}
    if args.plugin == "torch_ddp_fp16":
        booster_kwargs["mixed_precision"] = "fp16"
    if args.plugin.startswith("torch_ddp"):
        plugin = TorchDDPPlugin()
    elif args.plugin == "gemini":
        plugin = GeminiPlugin(
            precision=args.mixed_precision, offload_optim_frac=1.0, pin_memory=True, initial_scale=2**5
        )
    elif args.plugin == "low_level_zero":
        plugin = LowLevelZeroPlugin(precision=args.mixed_precision, initial_scale=2**5)
    elif args.plugin == "hybrid_parallel":
        plugin = HybridParallelPlugin(
            tp_size=args.tp_size,
            pp_size=args.pp_size,
            num_microbatches=None,
            microbatch_size=1,
            enable_all_optimization=True,
            precision=args.mixed_precision,
            initial_scale=1,
        )
    else:
        raise ValueError(f"Plugin with name {args.plugin} is not supported!")
    logger.info(f"Set plugin as {args.plugin}", ranks=[0])

    train_dataloader = plugin.prepare_dataloader(
        train_dataset, batch_size=args.batch_size, shuffle=True, drop_last=True, collate_fn=digits_collator
    )
    eval_dataloader = plugin.prepare_dataloader(
        eval_dataset, batch_size=args.batch_size, shuffle=True, drop_last=True, collate_fn=digits_collator
    )

    optimizer = HybridAdam(model.parameters(), lr=(args.learning_rate * world_size), weight_decay=args.weight_decay)

    def criterion(outputs, inputs):
        return outputs.loss

    total_steps = len(train_dataloader) * args.num_epoch
    num_warmup_steps = int(args.warmup_ratio * total_steps)
    lr_scheduler = CosineAnnealingWarmupLR(optimizer=optimizer, total_steps=total_steps, warmup_steps=num_warmup_steps)

    booster = Booster(plugin=plugin, **booster_kwargs)
    model, optimizer, _criterion, train_dataloader, lr_scheduler = booster.boost(
        model=model, optimizer=optimizer, criterion=criterion, dataloader=train_dataloader, lr_scheduler=lr_scheduler
    )

    if args.resume > 0:
        booster.load_model(model, f"{args.output_path}/model_{args.resume}")
        booster.load_optimizer(optimizer, f"{args.output_path}/optimizer_{args.resume}")
        booster.load_lr_scheduler(lr_scheduler, f"{args.output_path}/lr_scheduler_{args.resume}")

    logger.info("Start finetuning", ranks=[0])
    for epoch in range(args.resume, args.num_epoch):
        train_epoch(epoch, model, optimizer, criterion, lr_scheduler, train_dataloader, booster, coordinator)
        evaluate_model(epoch, model, criterion, eval_dataloader, booster, coordinator)
        os.makedirs(args.output_path, exist_ok=True)
        booster.save_model(model, f"{args.output_path}/model_{epoch + 1}", shard=True, use_safetensors=True)
        booster.save_optimizer(optimizer, f"{args.output_path}/optimizer_{epoch + 1}", shard=True, size_per_shard=10)
        booster.save_lr_scheduler(lr_scheduler, f"{args.output_path}/lr_scheduler_{epoch + 1}")
    logger.info("Finish finetuning", ranks=[0])


if __name__ == "__main__":
    main()
