'use strict';
(() => {
  const CHARACTER = 6.9, FEWEST = 4;
  const all = document.getElementById('frames');
  const left = +all.dataset.left, width = +all.dataset.width;
  const button = (id) => document.getElementById(id);
  const details = button('details'), matched = button('matched'), reset = button('reset');
  const search = button('search');

  const frames = [...all.querySelectorAll('.frame')].map((group) => {
    const rect = group.querySelector('rect'), label = group.querySelector('text');
    const x = (+rect.getAttribute('x') - left) / width;
    return {
      group, rect, label, x,
      end: x + +rect.getAttribute('width') / width,
      depth: +group.dataset.depth,
      name: group.dataset.name,
      about: group.querySelector('title').textContent.split('\n').join('  '),
    };
  });

  const place = (frame, from, to) => {
    const x = left + Math.max(0, from) * width;
    const wide = (Math.min(1, to) - Math.max(0, from)) * width;
    frame.rect.setAttribute('x', x);
    frame.rect.setAttribute('width', wide);
    frame.label.setAttribute('x', x + 3);
    const fits = Math.floor((wide - 6) / CHARACTER);
    const name = [...frame.name];
    frame.label.textContent = name.length <= fits ? frame.name
      : fits < FEWEST ? '' : name.slice(0, fits - 1).join('') + '…';
  };

  // Rounding in the file moves the edges of a box by less than this.
  const SLACK = 1e-4;
  const zoom = (to) => {
    const span = to.end - to.x;
    for (const frame of frames) {
      const within = frame.x >= to.x - SLACK && frame.end <= to.end + SLACK;
      const around = frame.depth < to.depth
        && frame.x <= to.x + SLACK && frame.end >= to.end - SLACK;
      const shown = around || (within && frame.depth >= to.depth);
      frame.group.style.display = shown ? '' : 'none';
      frame.group.classList.toggle('outside', around);
      if (shown) place(frame, (frame.x - to.x) / span, (frame.end - to.x) / span);
    }
    reset.style.visibility = to.depth < 0 ? 'hidden' : 'visible';
  };
  const everything = { x: 0, end: 1, depth: -1 };

  const find = (pattern) => {
    let looksLike;
    try { looksLike = new RegExp(pattern, 'i'); } catch (error) { alert(error.message); return; }
    let share = 0, counted = -1;
    for (const frame of frames) {
      const found = pattern !== '' && looksLike.test(frame.name);
      frame.group.classList.toggle('found', found);
      // The file lists a box before those below it, so overlapping matches count once.
      if (found && frame.x >= counted - SLACK) {
        share += frame.end - frame.x;
        counted = frame.end;
      }
    }
    matched.textContent = pattern === '' ? ' ' : `found in ${(share * 100).toFixed(1)} %`;
    search.textContent = pattern === '' ? 'search' : 'clear';
  };

  let searching = false;
  const toggleSearch = () => {
    const pattern = searching ? '' : prompt('Part of a name (a regular expression):', '');
    if (pattern === null) return;
    searching = pattern !== '';
    find(pattern);
  };

  for (const frame of frames) {
    frame.group.addEventListener('click', () => zoom(frame));
    frame.group.addEventListener('mouseover', () => { details.textContent = frame.about; });
    frame.group.addEventListener('mouseout', () => { details.textContent = ' '; });
  }
  reset.addEventListener('click', () => zoom(everything));
  search.addEventListener('click', toggleSearch);
  addEventListener('keydown', (event) => {
    if ((event.ctrlKey || event.metaKey) && event.key === 'f') {
      event.preventDefault();
      toggleSearch();
    } else if (event.key === 'Escape') {
      zoom(everything);
    }
  });
  search.style.visibility = 'visible';
})();
