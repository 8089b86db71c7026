"""What others measured of whole launches on an MI300X, and published."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Counted:
    """Counters of fmha_fwd_hd128_bf16_causal_rtna at B 16, H 16: midiareshadi/attn-dsl-bench,
    results/raw/counters_v1.csv.

    matrix_use: MfmaUtil, per cent. occupancy: OccupancyPercent; a workgroup on every CU is 25.
    flops: MfmaFlopsBF16, of one launch.
    """

    matrix_use: float
    occupancy: float
    flops: int

    @property
    def held(self) -> float:
        """Share of the time in which a CU holds a workgroup, 0 to 1."""
        return self.occupancy / 25

    @property
    def inside(self) -> float:
        """Matrix cores' share of that time."""
        return self.matrix_use / 100 / self.held


#: By length.
COUNTED = {
    1024: Counted(42.157, 18.227, 85_899_345_920),
    2048: Counted(50.130, 18.863, 309_237_645_312),
    4096: Counted(64.536, 22.276, 1_168_231_104_512),
    8192: Counted(67.653, 22.190, 4_535_485_464_576),
    16384: Counted(72.087, 23.078, 17_867_063_951_360),
}
#: AITER at D = 64, the same file: the kernel is composable_kernel's, of which there is no file.
COUNTED_64 = {1024: 19.4, 2048: 27.8, 4096: 35.5, 8192: 39.6, 16384: 42.3}

ROUNDINGS = ("rtne", "rtna", "rtz")
#: ms of moonmath-ai/amd-kernels and of AITER v3 by (B, H, S), D = 128, and rounding (their README).
TIMES = {
    (2, 24, 8192): ((3.083, 3.792), (3.022, 3.605), (2.983, 3.303)),
    (2, 24, 16384): ((11.670, 14.691), (11.479, 13.801), (11.385, 12.629)),
    (1, 32, 16384): ((8.013, 9.031), (7.828, 8.656), (7.731, 7.989)),
    (4, 16, 16384): ((15.591, 18.337), (15.331, 17.567), (15.055, 16.183)),
    (1, 64, 16384): ((15.528, 18.333), (15.239, 17.535), (15.040, 16.161)),
    (2, 24, 32768): ((46.002, 54.794), (44.440, 52.363), (44.075, 48.549)),
    (2, 16, 65536): ((117.612, 136.301), (115.550, 130.278), (114.665, 121.668)),
    (2, 8, 86016): ((101.071, 118.939), (100.165, 114.515), (99.397, 106.513)),
    (1, 16, 131072): ((232.517, 269.278), (228.475, 258.092), (226.152, 239.587)),
}
#: The shape on which clocks are fitted.
LONGEST = (1, 16, 131072)
