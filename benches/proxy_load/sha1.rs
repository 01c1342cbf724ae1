//! SHA-1 (FIPS 180-4), which the handshake of a websocket asks for.

const BLOCK: usize = 64;

/// The digest of `data`.
pub(crate) fn sha1(data: &[u8]) -> [u8; 20] {
    let mut state = [0x6745_2301_u32, 0xefcd_ab89, 0x98ba_dcfe, 0x1032_5476, 0xc3d2_e1f0];
    let mut padded = data.to_vec();
    padded.push(0x80);
    while padded.len() % BLOCK != BLOCK - 8 {
        padded.push(0);
    }
    padded.extend_from_slice(&(data.len() as u64 * 8).to_be_bytes());
    for block in padded.chunks_exact(BLOCK) {
        compress(&mut state, block);
    }
    let mut digest = [0; 20];
    for (place, word) in digest.chunks_exact_mut(4).zip(state) {
        place.copy_from_slice(&word.to_be_bytes());
    }
    digest
}

fn compress(state: &mut [u32; 5], block: &[u8]) {
    let mut words = [0_u32; 80];
    for (word, bytes) in words.iter_mut().zip(block.chunks_exact(4)) {
        *word = u32::from_be_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    }
    for at in 16..80 {
        words[at] = (words[at - 3] ^ words[at - 8] ^ words[at - 14] ^ words[at - 16]).rotate_left(1);
    }
    let mut round = *state;
    for (at, word) in words.iter().enumerate() {
        let (mix, constant) = mixed(at, &round);
        let sum = [round[0].rotate_left(5), mix, round[4], constant, *word];
        let next = sum.into_iter().fold(0, u32::wrapping_add);
        round = [next, round[0], round[1].rotate_left(30), round[2], round[3]];
    }
    for (word, added) in state.iter_mut().zip(round) {
        *word = word.wrapping_add(added);
    }
}

fn mixed(at: usize, round: &[u32; 5]) -> (u32, u32) {
    let [_, one, two, three, _] = *round;
    match at {
        0..20 => ((one & two) | (!one & three), 0x5a82_7999),
        20..40 => (one ^ two ^ three, 0x6ed9_eba1),
        40..60 => ((one & two) | (one & three) | (two & three), 0x8f1b_bcdc),
        _ => (one ^ two ^ three, 0xca62_c1d6),
    }
}
