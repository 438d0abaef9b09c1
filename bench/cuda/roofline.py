#!/usr/bin/env python3
"""Roofline plot of measured decode launches: share of the plain-read roof over the bytes that a launch reads.

usage: roofline.py RESULTS.json OUT.svg
"""
import json
import math
import sys

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 420, 60, 20, 46, 50
COLORS = ["#1f6fb2", "#c2571a", "#2e8b57", "#7d4ba0", "#8a8a00"]
DECADES = (0.004, 6.0)  # GB on the x axis


def main():
    results = json.load(open(sys.argv[1]))
    x = lambda gb: LEFT + (WIDTH - LEFT - RIGHT) * math.log(gb / DECADES[0]) / math.log(DECADES[1] / DECADES[0])
    y = lambda percent: HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * percent / 100
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
           f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
           f'<text x="{LEFT}" y="20" font-size="14">INT2 decode: share of the plain-read roof ({results["peak_tbps"]:.2f} TB/s, {results["device"]})</text>']
    for percent in range(0, 101, 20):
        out.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(percent):.1f}" y2="{y(percent):.1f}" stroke="#ddd"/>')
        out.append(f'<text x="{LEFT - 8}" y="{y(percent) + 4:.1f}" text-anchor="end">{percent} %</text>')
    for gb, label in ((0.005, "5 MB"), (0.02, "20 MB"), (0.1, "100 MB"), (0.5, "500 MB"), (2.0, "2 GB")):
        out.append(f'<line x1="{x(gb):.1f}" x2="{x(gb):.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="#eee"/>')
        out.append(f'<text x="{x(gb):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{label}</text>')
    out.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 10}" text-anchor="middle">bytes a launch must read</text>')
    # the goal: roof + 6.5 us below 150 MB, 80 % from there, 90 % from 600 MB
    roof = results["peak_tbps"] * 1e3  # GB/s
    goal = [(gb, 100 * (gb / roof) / (gb / roof + 6.5e-6)) for gb in (0.005 * 1.2 ** i for i in range(19)) if gb < 0.15]
    goal += [(0.15, 80), (0.6, 80), (0.6, 90), (5.5, 90)]
    out.append('<polyline fill="none" stroke="#999" stroke-dasharray="5 4" points="' + " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in goal) + '"/>')
    out.append(f'<text x="{x(1.0):.1f}" y="{y(92):.1f}" fill="#777">goal</text>')
    for color, series in zip(COLORS, results["series"]):
        points = sorted((row["megabytes"] / 1e3, row["roof_percent"]) for row in series["rows"])
        out.append(f'<polyline fill="none" stroke="{color}" points="' + " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in points) + '"/>')
        out += [f'<circle cx="{x(a):.1f}" cy="{y(b):.1f}" r="3.5" fill="{color}"/>' for a, b in points]
    for i, (color, series) in enumerate(zip(COLORS, results["series"])):
        out.append(f'<text x="{LEFT + 14}" y="{TOP + 16 + 16 * i}" fill="{color}">{series["name"]}</text>')
    out.append("</svg>")
    open(sys.argv[2], "w").write("\n".join(out) + "\n")


if __name__ == "__main__":
    main()
