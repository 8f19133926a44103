"""Images: a torchvision model and transforms, loader workers, SGD with a schedule."""

import torch
from torch.utils.data import DataLoader, Dataset
from torchvision import models, transforms


class Squares(Dataset):
    """Bright squares on noise; the label is the quadrant."""

    change = transforms.Compose(
        [transforms.RandomHorizontalFlip(0.0), transforms.ColorJitter(0.2), transforms.Resize(48)]
    )

    def __len__(self):
        return 96

    def __getitem__(self, index):
        image = torch.rand(3, 32, 32, generator=torch.Generator().manual_seed(index)) * 0.5
        label = index % 4
        image[:, 16 * (label // 2) :, 16 * (label % 2) :][:, :16, :16] += 0.5
        return self.change(image), label


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    net = models.shufflenet_v2_x0_5(num_classes=4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 36)
    loader = DataLoader(Squares(), batch_size=8, shuffle=True, num_workers=2)
    for _ in range(3):
        for images, labels in loader:
            loss = torch.nn.functional.cross_entropy(net(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    print("final loss", loss.item().hex())


if __name__ == "__main__":
    main()
