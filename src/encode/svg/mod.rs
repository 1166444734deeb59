//! A self-contained flame graph for browsers: no network, no other file.

mod tree;

use std::borrow::Cow;
use std::fmt::Write;

use super::frames::{BoxShare, Frame, Frames};
use crate::profile::{FrameKind, Profile};
use tree::{DrawnBoxes, Node, Tree, What};

const WIDTH: f64 = 1200.0;
const MARGIN: f64 = 10.0;
const ROW: f64 = 18.0;
const LINE: f64 = 17.0;
/// Width of a character in the monospaced font below.
const CHARACTER: f64 = 6.9;
/// Narrower boxes are left out.
const NARROWEST: f64 = 0.2;

/// Maximum size of all boxes. Wider ones take precedence. No browser can show as many.
const MOST_BYTES: usize = 8 * 1024 * 1024;
/// Size of a box without its name and locations.
const BYTES_A_BOX: usize = 400;
/// Maximum characters of a name, and maximum names listed for a folded box.
const LONGEST_SHOWN: usize = 500;
const MOST_NAMED: usize = 100;

/// Draws a flame graph of CPU time, waits, awaits and scheduling delays, and of idle time of the outermost kept spans that
/// nothing explains. The outermost span is on top, functions are below their callers, and
/// inlined functions below the functions that contain them.
///
/// The width of a box is its time. What a function waited for is below it, in blue. Tooltips show names, source
/// locations and times; a click zooms, and a search shows the share of its matches. Boxes that are too narrow to be
/// visible are left out. If more than some ten thousand remain, the narrowest of them are left out as well, and a line
/// states how many.
pub fn svg(profile: &Profile) -> String {
    svg_within(profile, MOST_BYTES)
}

fn svg_within(profile: &Profile, most_bytes: usize) -> String {
    let frames = Frames::of(profile);
    let sizes: Vec<usize> = frames.names().map(size).collect();
    let total_ns: u64 = frames.paths().iter().map(|path| path.share.weight_ns).sum();
    let scale = (WIDTH - 2.0 * MARGIN) / total_ns.max(1) as f64;
    let room = DrawnBoxes {
        narrowest_ns: (NARROWEST / scale).ceil() as u64,
        most_bytes,
        bytes: &|id| sizes.get(id.number()).copied().unwrap_or(BYTES_A_BOX),
    };
    let tree = Tree::of(&frames, room);
    let mut notes: Vec<_> = profile.notes.iter().map(|note| shown(note)).collect();
    if tree.left_out > 0 {
        let left_out = format!("{} boxes left out: no room for more", tree.left_out);
        notes.push(Cow::Owned(left_out));
    }
    let top = MARGIN * 2.0 + LINE * (notes.len() + 3) as f64;
    let rows = tree.boxes.iter().map(|node| node.depth + 1).max().unwrap_or(0);
    let height = top + ROW * rows as f64 + LINE * 2.0;
    let mut svg = String::new();
    let mut boxes = Boxes { svg: &mut svg, frames: &frames, top, scale, total_ns: total_ns.max(1) };
    // Writing into a string does not fail.
    _ = write_svg(&mut boxes, &shown(&profile.title), &notes, &tree, height);
    svg
}

/// The size of a box, which contains its name twice.
fn size(name: &str) -> usize {
    let escaped: usize = shown(name).chars().map(|c| Text::escaped(c).map_or(4, str::len)).sum();
    BYTES_A_BOX + 2 * escaped
}

/// The part of a name that is shown.
fn shown(name: &str) -> Cow<'_, str> {
    match name.char_indices().nth(LONGEST_SHOWN) {
        Some((end, _)) => format!("{}…", name.get(..end).unwrap_or_default()).into(),
        None => name.into(),
    }
}

fn write_svg(
    boxes: &mut Boxes<'_>,
    title: &str,
    notes: &[Cow<'_, str>],
    tree: &Tree<'_>,
    height: f64,
) -> std::fmt::Result {
    let svg = &mut *boxes.svg;
    write!(
        svg,
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n\
         <svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" \
         width=\"{WIDTH}\" height=\"{height}\" font-family=\"ui-monospace, 'DejaVu Sans Mono', \
         Menlo, Consolas, monospace\" font-size=\"11.5\">\n\
         <title>{}</title>\n<style>{}</style>\n\
         <rect width=\"100%\" height=\"100%\" fill=\"#fdfdfb\"/>\n",
        Text(title),
        include_str!("style.css"),
    )?;
    let mut y = MARGIN + LINE;
    text(svg, "title", MARGIN, y, title)?;
    for note in notes {
        y += LINE;
        text(svg, "note", MARGIN, y, note)?;
    }
    y += LINE * 1.3;
    writeln!(
        svg,
        "<text id=\"details\" class=\"note\" x=\"{MARGIN}\" y=\"{y:.1}\"> </text>\n\
         <text id=\"reset\" class=\"button\" x=\"{}\" y=\"{}\">reset zoom</text>\n\
         <text id=\"search\" class=\"button\" x=\"{}\" y=\"{}\">search</text>\n\
         <text id=\"matched\" class=\"note\" x=\"{}\" y=\"{y:.1}\" text-anchor=\"end\"> </text>",
        WIDTH - 170.0,
        MARGIN + LINE,
        WIDTH - 65.0,
        MARGIN + LINE,
        WIDTH - MARGIN,
    )?;
    writeln!(
        svg,
        "<g id=\"frames\" data-left=\"{MARGIN}\" data-width=\"{}\">",
        WIDTH - 2.0 * MARGIN
    )?;
    for node in &tree.boxes {
        boxes.draw(node)?;
    }
    let svg = &mut *boxes.svg;
    writeln!(svg, "</g>")?;
    legend(svg, height - LINE)?;
    writeln!(svg, "<script><![CDATA[\n{}]]></script>\n</svg>", include_str!("script.js"))
}

fn text(svg: &mut String, class: &str, x: f64, y: f64, content: &str) -> std::fmt::Result {
    writeln!(svg, "<text class=\"{class}\" x=\"{x}\" y=\"{y:.1}\">{}</text>", Text(content))
}

fn legend(svg: &mut String, y: f64) -> std::fmt::Result {
    let mut x = MARGIN;
    for (kind, name) in [
        (None, "span"),
        (Some(FrameKind::Rust), "Rust"),
        (Some(FrameKind::Native), "other code"),
        (Some(FrameKind::Kernel), "kernel"),
        (Some(FrameKind::Wait), "waiting"),
        (Some(FrameKind::Remark), "remark"),
    ] {
        let fill = color(kind, "");
        writeln!(
            svg,
            "<rect x=\"{x}\" y=\"{}\" width=\"10\" height=\"10\" fill=\"{fill}\"/>",
            y - 9.0
        )?;
        text(svg, "note", x + 15.0, y, name)?;
        x += 40.0 + CHARACTER * name.len() as f64;
    }
    Ok(())
}

struct Boxes<'a> {
    svg: &'a mut String,
    frames: &'a Frames<'a>,
    top: f64,
    /// Width of a nanosecond.
    scale: f64,
    total_ns: u64,
}

impl Boxes<'_> {
    fn draw(&mut self, node: &Node<'_>) -> std::fmt::Result {
        let Node { depth, share: BoxShare { weight_ns, counts }, .. } = *node;
        let x = MARGIN + node.begin_ns as f64 * self.scale;
        let width = weight_ns as f64 * self.scale;
        let y = self.top + ROW * depth as f64;
        let share = weight_ns as f64 * 100.0 / self.total_ns as f64;
        let time =
            humantime::format_duration(std::time::Duration::from_micros(weight_ns.div_ceil(1000)));
        let of_kinds = counts.into_iter().zip(["sample", "wait", "await", "scheduling delay"]);
        let counted = of_kinds
            .filter(|(count, _)| *count > 0)
            .map(|(count, what)| format!("{count} {what}{}", if count == 1 { "" } else { "s" }));
        let facts = [time.to_string(), format!("{share:.1} %")];
        let facts: Vec<_> = facts.into_iter().chain(counted).collect();
        let (name, kind, folded) = match &node.what {
            What::Frame(Frame { name, kind }) => (shown(self.frames.name(*name)), *kind, &[][..]),
            What::Folded(calls) => (
                format!("… {} outer calls", calls.len()).into(),
                Some(FrameKind::Remark),
                calls.as_slice(),
            ),
        };
        let mut details = format!("{name} ({})", facts.join(", "));
        for place in &node.places {
            _ = write!(details, "\n{}", shown(&place.to_string()));
        }
        for frame in folded.iter().take(MOST_NAMED) {
            _ = write!(details, "\n{}", shown(self.frames.name(frame.name)));
        }
        if folded.len() > MOST_NAMED {
            _ = write!(details, "\n… and {} more", folded.len() - MOST_NAMED);
        }
        writeln!(
            self.svg,
            "<g class=\"frame\" data-depth=\"{depth}\" data-name=\"{}\"><title>{}</title>\
             <rect x=\"{x:.2}\" y=\"{y}\" width=\"{width:.2}\" height=\"{}\" fill=\"{}\"/>\
             <text x=\"{:.2}\" y=\"{:.1}\">{}</text></g>",
            Text(&name),
            Text(&details),
            ROW - 1.0,
            color(kind, &name),
            x + 3.0,
            y + 12.5,
            Text(&shortened(&name, width)),
        )
    }
}

/// The part of a name that fits.
fn shortened(name: &str, width: f64) -> String {
    let fits = ((width - 6.0) / CHARACTER).max(0.0) as usize;
    if name.chars().count() <= fits {
        name.to_owned()
    } else if fits < 4 {
        String::new()
    } else {
        name.chars().take(fits - 1).chain(['…']).collect()
    }
}

/// A color for the kind of frame, varied by name so that neighbours differ.
fn color(kind: Option<FrameKind>, name: &str) -> String {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for byte in name.bytes() {
        hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    }
    let vary = (hash >> 32) as u32 % 24;
    match kind {
        None => format!("hsl({}, 55%, 78%)", 215 + vary / 2),
        Some(FrameKind::Rust) => format!("hsl({}, 82%, {}%)", 18 + vary, 68 + vary % 8),
        Some(FrameKind::Native) => format!("hsl({}, 45%, {}%)", 130 + vary, 74 + vary % 6),
        Some(FrameKind::Kernel) => format!("hsl({}, 35%, {}%)", 280 + vary, 80 + vary % 6),
        Some(FrameKind::Wait) => format!("hsl({}, 65%, {}%)", 195 + vary / 4, 62 + vary % 8),
        Some(FrameKind::Remark) => "#d9d9d9".to_owned(),
    }
}

/// Escaped XML text, without characters that XML does not allow.
struct Text<'a>(&'a str);

impl Text<'_> {
    /// The replacement of a character, if it has one.
    fn escaped(character: char) -> Option<&'static str> {
        Some(match character {
            '&' => "&amp;",
            '<' => "&lt;",
            '>' => "&gt;",
            '"' => "&quot;",
            '\'' => "&#39;",
            '\n' | '\t' => return None,
            c if c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}') => "�",
            _ => return None,
        })
    }
}

impl std::fmt::Display for Text<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for character in self.0.chars() {
            match Self::escaped(character) {
                Some(escaped) => f.write_str(escaped)?,
                None => f.write_char(character)?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{awaiting, checkout, with_idle};
    use super::*;

    #[test]
    fn is_well_formed_and_shows_titles_notes_and_boxes() {
        let svg = svg(&checkout());
        let document = roxmltree::Document::parse(&svg).unwrap();
        let texts: Vec<_> = document
            .descendants()
            .filter(|node| node.has_tag_name("text"))
            .filter_map(|node| node.text())
            .collect();
        assert!(texts.contains(&"GET /checkout <slow>"));
        assert!(texts.contains(&"4 samples & no losses"));
        assert!(texts.contains(&"shop::price"));
        let titles: Vec<_> = document
            .descendants()
            .filter(|node| node.has_tag_name("title"))
            .filter_map(|node| node.text())
            .collect();
        assert!(titles.contains(&"price all (10ms, 50.0 %, 2 samples)"), "{titles:?}");
        assert!(
            titles.contains(&"shop::price (5ms, 25.0 %, 1 sample)\n/shop/src/price.rs:7"),
            "{titles:?}"
        );
    }

    #[test]
    fn awaits_delays_and_unexplained_idle_time_are_boxes() {
        let svg = svg(&with_idle(awaiting(), 1_300));
        let document = roxmltree::Document::parse(&svg).unwrap();
        let titles: Vec<_> = document
            .descendants()
            .filter(|node| node.has_tag_name("title"))
            .filter_map(|node| node.text())
            .collect();
        for expected in [
            "GET /checkout (1s 300ms, 100.0 %, 4 samples, 2 awaits, 1 scheduling delay)",
            "[await] (1s 180ms, 90.8 %, 2 awaits)",
            "[scheduling delay behind report] (20ms, 1.5 %, 1 scheduling delay)",
            "[idle: not explained] (80ms, 6.2 %)",
        ] {
            assert!(titles.contains(&expected), "{expected} in {titles:?}");
        }
    }

    #[test]
    fn boxes_lie_inside_those_of_their_callers() {
        let svg = svg(&checkout());
        let document = roxmltree::Document::parse(&svg).unwrap();
        let number = |node: &roxmltree::Node<'_, '_>, name| -> f64 {
            node.attribute(name).unwrap().parse().unwrap()
        };
        let mut above: Vec<(f64, f64)> = Vec::new();
        for frame in document.descendants().filter(|n| n.attribute("class") == Some("frame")) {
            let depth = number(&frame, "data-depth") as usize;
            let rect = frame.children().find(|node| node.has_tag_name("rect")).unwrap();
            let (left, width) = (number(&rect, "x"), number(&rect, "width"));
            above.truncate(depth);
            if let Some((parent_left, parent_right)) = above.last() {
                assert!(left + 0.02 >= *parent_left && left + width <= parent_right + 0.02);
            }
            above.push((left, left + width));
        }
        assert!(!above.is_empty());
    }

    #[test]
    fn the_outer_calls_that_all_samples_share_are_one_box() {
        let profile = super::super::tests::deep(60);
        let svg = svg(&profile);
        let document = roxmltree::Document::parse(&svg).unwrap();
        let frames = document.descendants().filter(|n| n.attribute("class") == Some("frame"));
        let names: Vec<_> = frames.map(|frame| frame.attribute("data-name").unwrap()).collect();
        assert_eq!(names[..2], ["request", "… 48 outer calls"]);
        assert_eq!(names.len(), 2 + 12);
        assert_eq!(names.last(), Some(&"f59"));
        // Folded frames are named in the tooltip.
        assert!(svg.contains("\nf0\nf1\n"));
    }

    #[test]
    fn boxes_that_do_not_fit_are_left_out_and_counted() {
        for (stacks, frames) in [(1, 1_000), (30, 40), (200, 100)] {
            let profile = super::super::deep::alternating(stacks, frames, 4);
            for most_bytes in [0, 10_000, 100_000, 1_000_000] {
                let svg = svg_within(&profile, most_bytes);
                assert!(svg.len() <= most_bytes + 50_000, "{} of {most_bytes}", svg.len());
                let document = roxmltree::Document::parse(&svg).unwrap();
                let is_box = |n: &roxmltree::Node<'_, '_>| n.attribute("class") == Some("frame");
                // Each box is directly below another.
                let mut depths = vec![];
                for frame in document.descendants().filter(is_box) {
                    let depth: usize = frame.attribute("data-depth").unwrap().parse().unwrap();
                    assert!(depth <= depths.last().map_or(0, |last| last + 1));
                    depths.push(depth);
                }
                assert_eq!(depths.is_empty(), most_bytes == 0);
                let says_so = svg.contains(" boxes left out: no room for more");
                assert!(says_so || depths.len() > 10, "{stacks} {frames} {most_bytes}");
            }
        }
    }

    #[test]
    fn names_are_cut_to_the_width() {
        assert_eq!(shortened("abcdefghij", 100.0), "abcdefghij");
        assert_eq!(shortened("abcdefghij", 48.0), "abcde…");
        assert_eq!(shortened("abcdefghij", 20.0), "");
    }

    #[test]
    fn text_never_breaks_the_document() {
        assert_eq!(Text("a<b>&\"c\"\u{1}").to_string(), "a&lt;b&gt;&amp;&quot;c&quot;�");
    }
}
